"""Whether this machine and what is installed on it can run a job: findings with a cause and a fix each.

In the order a reader asks: interpreter, image, machine, packages.
"""

import math
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.version import Version

import bundle
from bundle import files
from bundle.environment.ascend import cann
from bundle.environment.hardware import detect
from bundle.environment.image import image_findings
from bundle.environment.machine import Fact, Finding, Hardware, Machine, fail, ok, warn
from bundle.environment.packages import Package, Stack, imports_triton, minor_version, triton_of
from bundle.environment.search import SearchPath
from bundle.errors import EnvironmentUnfit, bytes_shown

OLDEST = (3, 11)  # of Python; pyproject.toml, requires-python
# Ranks of one node exchange through /dev/shm where they have no peer access, and data workers always do.
ENOUGH_SHARED_MEMORY = 2**30
# A rank holds a socket per peer and group, and a descriptor per data shard.
ENOUGH_FILES = 4096
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
SUPPORTED = (Version("0.12"), Version("0.20"))  # megatron-core, from and below; pyproject.toml, extra cpu
# CUDA major of torch -> the oldest driver that runs it (CUDA Compatibility, minor-version table).
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}


def examine(
    machine: Machine, installed: Stack, backend: str = "auto"
) -> tuple[Hardware | None, tuple[Finding, ...]]:
    """The hardware (None if it cannot be told) and every finding about it and about the packages."""
    own = Path(bundle.__file__).parent
    findings = [*interpreter(sys.version_info[:2], installed.path, own)]
    findings += image_findings(machine, installed)
    try:
        hardware = detect(backend, machine)
    except EnvironmentUnfit as error:
        fix = "do what the line says, then run doctor again"
        causes = error.violations or (str(error),)
        return None, (*findings, *(fail("hardware", cause, fix) for cause in causes))
    findings += machine_findings(hardware)
    findings += package_findings(installed, hardware, cann(machine), machine.environ)
    return hardware, tuple(findings)


def interpreter(version: tuple[int, int], path: SearchPath, own: Path) -> Iterator[Finding]:
    """Findings about the Python `version` and about packages named bundle on `path`; `own` is ours."""
    shown = ".".join(map(str, version))
    if version < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        yield fail("python", f"Python {shown} is older than {wanted}", f"use Python {wanted} or newer")
    else:
        yield ok("python", f"Python {shown}")
    yield from _bundles(path, own)


def _bundles(path: SearchPath, own: Path) -> Iterator[Finding]:
    """A worker starts as `python -m bundle` in this directory, so the first bundle on its path runs."""
    others, behind = [], False
    for entry in path.entries:
        for name, file in (("bundle", "bundle/__init__.py"), ("bundle.py", "bundle.py")):
            if (entry.path / name).resolve() == own.resolve():
                behind = True
            elif (entry.path / file).is_file():
                others.append((entry.path / name, entry.origin, behind))
    if not others:
        yield ok("bundle", f"workers import {own}")
    for place, origin, harmless in others:
        fix = f"rename or remove {place}, or start jobs from another directory"
        if harmless:
            cause = f"a second package of that name at {place} ({origin}); ours comes first"
            yield warn("bundle", cause, fix)
        else:
            yield fail("bundle", f"a worker would import {place} ({origin}) instead of {own}", fix)


def machine_findings(hardware: Hardware) -> Iterator[Finding]:
    """Findings about the hardware itself."""
    yield ok("hardware", f"{hardware.backend}: {hardware.reason}")
    yield from _devices(hardware)
    for note in hardware.notes:
        yield warn("hardware", note, "check that this is what you meant")
    yield from _host(hardware)


def _devices(hardware: Hardware) -> Iterator[Finding]:
    if not hardware.devices:
        return
    if hardware.unfit:
        yield fail("hardware", hardware.unfit, "the cpu backend runs anywhere: --backend cpu")
    yield _known("driver", hardware.driver)
    if len(hardware.devices) > 1:
        yield _known("links", hardware.link)
    ports = hardware.rdma.value or ()
    yield ok("rdma", ", ".join(ports) or hardware.rdma.reason)
    locked = hardware.host.locked_memory
    if ports and locked.value is not None and locked.value < math.inf:
        cause = f"RDMA registers memory, and only {bytes_shown(locked.value)} may be locked ({locked.reason})"
        yield warn("locked memory", cause, "`ulimit -l unlimited`, docker `--ulimit memlock=-1`, or IPC_LOCK")


def _known(subject: str, fact: Fact[str]) -> Finding:
    if fact.value is None:
        return warn(
            subject, f"unknown: {fact.reason}", "install or mount the vendor's tool into this container"
        )
    return ok(subject, str(fact))


def _host(hardware: Hardware) -> Iterator[Finding]:
    host = hardware.host
    ranks = max(len(hardware.devices), 1)
    yield ok("memory", f"{bytes_shown(host.memory.value)} ({host.memory.reason})")
    if host.processors.value is not None and host.processors.value < ranks:
        cause = f"{host.processors.value:g} processors for {ranks} ranks ({host.processors.reason})"
        yield warn("processors", cause, "raise the container's cpu limit to a few per device")
    shared = host.shared_memory
    if shared.value is None or shared.value < ENOUGH_SHARED_MEMORY:
        cause = f"/dev/shm has {bytes_shown(shared.value)} ({shared.reason})"
        fix = "docker `--shm-size=16g` or `--ipc=host`; Kubernetes: an emptyDir of medium Memory at /dev/shm"
        yield warn("shared memory", cause, fix)
    most = host.open_files
    if most.value is not None and most.value < ENOUGH_FILES:
        cause = f"only {most.value:g} ({most.reason})"
        yield warn("open files", cause, f"`ulimit -n {ENOUGH_FILES}` or more")


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
    elif torch and (wanted := _minor(torch)) and (made := _minor(npu)) and wanted != made:
        cause = f"torch-npu {npu.version} is made for another torch than {torch.version}"
        yield fail("torch-npu", cause, f"pip install 'torch-npu=={torch.base_version}.*'")
    else:
        yield ok("torch-npu", f"{_shown(npu)}, CANN {cann}")


def _minor(package: Package) -> tuple[int, int] | None:
    return minor_version(package.version or "")


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
    imports, said_by = imports_triton(megatron.core.root, version)
    if imports and stack.package("triton") is None:
        cause = f"not installed, and megatron-core {core.version} imports it on every machine ({said_by})"
        yield fail("triton", cause, f"pip install {triton_of(extra)}")


def _shown(package: Package) -> str:
    commit = f" at {package.commit[:12]}" if package.commit else ""
    return f"{package.name} {package.version or 'of unknown version'}{commit} in {package.path}"
