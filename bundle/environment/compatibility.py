"""What is installed, and the combinations that break an import or train wrongly."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.version import Version

from bundle import files
from bundle.environment.facts import Fact, Finding, Hardware, fail, ok, warn
from bundle.environment.packages import Package, Stack

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
SUPPORTED = (Version("0.12"), Version("0.20"))  # megatron-core, from and below; pyproject.toml, extra cpu

# CUDA major of torch -> the oldest driver that runs it (CUDA Compatibility, minor-version table).
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}


def package_findings(
    stack: Stack, hardware: Hardware, cann: Fact[str], environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Findings about torch, megatron-core and the accelerator's packages on this hardware."""
    extra = hardware.backend
    torch = stack.package("torch")
    if torch is None:
        fix = f"pip install 'mcore-bundle[{extra}]' (TORCH_INDEX in the README: another index for torch)"
        yield fail("torch", "not installed: nothing can be trained here; plans and patch decisions work", fix)
    else:
        yield ok("torch", _shown(torch))
        yield from _cuda_build(torch, hardware)
    yield from _npu(stack, torch, hardware, cann, environ)
    yield from _megatron(stack, extra)
    if hardware.backend == "cuda" and stack.package("transformer-engine") is None:
        yield fail("transformer-engine", "not installed: the cuda backend builds its layers from it",
                   "pip install 'mcore-bundle[cuda]'")  # fmt: skip


def _cuda_build(torch: Package, hardware: Hardware) -> Iterator[Finding]:
    if hardware.backend != "cuda":
        return
    source = files.read(torch.path / "version.py") if torch.path else None
    built = re.search(r"^cuda\b[^=]*=\s*['\"](\d+)\.\d+", source or "", re.MULTILINE)
    if built is None:
        cause = f"torch {torch.version} has no CUDA in it, and this machine has NVIDIA GPUs"
        yield fail("torch", cause, "install a CUDA build of torch, or ask for `--backend cpu`")
        return
    floor = _OLDEST_DRIVER.get(int(built[1]))
    driver = hardware.driver.value
    if floor and driver and int(driver.split(".")[0]) < floor:
        cause = f"torch {torch.version} is for CUDA {built[1]}, which needs driver {floor}; this is {driver}"
        yield fail(
            "torch",
            cause,
            "install the cuda-compat package or a newer driver, or an older CUDA build of torch",
        )


def _npu(
    stack: Stack, torch: Package | None, hardware: Hardware, cann: Fact[str], environ: Mapping[str, str]
) -> Iterator[Finding]:
    npu = stack.package("torch-npu")
    if npu is None:
        if hardware.backend == "ascend":
            yield fail(
                "torch-npu", "not installed, and this machine has NPUs", "pip install 'mcore-bundle[ascend]'"
            )
        return
    if hardware.backend == "cuda":
        cause = f"{_shown(npu)} beside NVIDIA GPUs: torch refuses two kinds of accelerator in one process"
        yield fail("torch-npu", cause, "pip uninstall torch-npu: one environment per backend")
    elif cann.value is None and environ.get(AUTOLOAD) != "0":
        cause = f"{_shown(npu)} without CANN makes `import torch` itself fail ({cann.reason})"
        yield fail("torch-npu", cause, f"pip uninstall torch-npu, or set {AUTOLOAD}=0, or install CANN")
    elif torch and torch.base_version and npu.base_version and not _same_minor(torch, npu):
        cause = f"torch-npu {npu.version} is made for another torch than {torch.version}"
        yield fail("torch-npu", cause, f"pip install 'torch-npu=={torch.base_version}.*'")
    else:
        yield ok("torch-npu", f"{_shown(npu)}, CANN {cann}")


def _same_minor(one: Package, other: Package) -> bool:
    return Version(one.base_version or "0").release[:2] == Version(other.base_version or "0").release[:2]


def _megatron(stack: Stack, extra: str) -> Iterator[Finding]:
    megatron = stack.megatron
    if megatron.core is None:
        yield fail("megatron-core", "not installed", f"pip install 'mcore-bundle[{extra}]'")
        return
    core = stack.package("megatron-core")
    assert core is not None
    if megatron.conflict:
        yield fail(
            "megatron-core", megatron.conflict, "put one tree first on PYTHONPATH, or uninstall the other"
        )
    elif len(megatron.copies) > 1:
        hidden = ", ".join(
            f"{c.root} ({c.version}, {c.origin})" for c in megatron.copies if c is not megatron.core
        )
        cause = f"{len(megatron.copies)} copies on the path; {megatron.core.root} wins over {hidden}"
        yield warn("megatron-core", cause, "uninstall the copies that no job means")
    else:
        yield ok("megatron-core", _shown(core))
    if core.base_version is None:
        return
    version = Version(core.base_version)
    if not SUPPORTED[0] <= version < SUPPORTED[1]:
        cause = f"{core.version} is outside {SUPPORTED[0]} to {SUPPORTED[1]}: no patch was reviewed for it"
        yield warn("megatron-core", cause, "see `mcore-bundle patches plan`, or install a supported release")
    imports, said_by = _imports_triton(megatron.core.package / "core/transformer/moe", version)
    if imports and stack.package("triton") is None:
        cause = f"not installed, and megatron-core {core.version} imports it on every machine ({said_by})"
        yield fail("triton", cause, "pip install triton")


def _imports_triton(experts: Path, version: Version) -> tuple[bool, str]:
    """Whether megatron-core needs triton to be imported, and what says so: its source, else its number."""
    if not files.is_directory(experts):
        return version >= Version("0.18"), f"by the number {version} alone"
    for file in ("paged_stash.py", "ops/paged_stash.py"):
        if re.search(r"^import triton", files.read(experts / file) or "", re.MULTILINE):
            return True, f"read in transformer/moe/{file}"
    return False, ""


def _shown(package: Package) -> str:
    commit = f" at {package.commit[:12]}" if package.commit else ""
    return f"{package.name} {package.version or 'of unknown version'}{commit} in {package.path}"
