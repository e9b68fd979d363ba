"""Checks of whether this machine and its packages can run a job; each finding has a cause and a fix.

The order of the findings: interpreter, image, machine, packages.
"""

import math
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.version import Version

import bundle
from bundle import files
from bundle.environment.ascend import read_cann_version
from bundle.environment.hardware import count_node_0_open_files, detect
from bundle.environment.image import check_image
from bundle.environment.machine import DetectedValue, Finding, Hardware, Machine, fail, ok, warn
from bundle.environment.packages import (
    InstalledPackages,
    Package,
    detect_megatron_triton_import,
    get_triton_distribution,
    parse_minor_version,
)
from bundle.environment.search import SearchPath
from bundle.errors import EnvironmentUnfit, format_bytes

OLDEST_PYTHON = (3, 11)  # of Python; pyproject.toml, requires-python
# Ranks of one node exchange through /dev/shm where they have no peer access, and data workers always do.
ENOUGH_SHARED_MEMORY = 2**30
# A rank holds a socket per peer and group, and a descriptor per data shard.
ENOUGH_FILES = 4096
AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
# megatron-core, from and below; the extras of pyproject.toml say the same, which a test compares.
SUPPORTED_MEGATRON = (Version("0.12"), Version("0.20"))
# CUDA major of torch -> the oldest driver that runs it (CUDA Compatibility, minor-version table).
_OLDEST_DRIVER_BY_CUDA = {11: 450, 12: 525, 13: 580}


def examine(
    machine: Machine, installed: InstalledPackages, backend: str = "auto"
) -> tuple[Hardware | None, tuple[Finding, ...]]:
    """Return the hardware (None if it is unknown) and every finding about it and about the packages."""
    package_directory = Path(bundle.__file__).parent
    findings = [*check_interpreter(sys.version_info[:2], installed.search_path, package_directory)]
    findings += check_image(machine, installed)
    try:
        hardware = detect(backend, machine)
    except EnvironmentUnfit as error:
        fix = "fix this cause, then run doctor again"
        causes = error.violations or (str(error),)
        return None, (*findings, *(fail("hardware", cause, fix) for cause in causes))
    findings += check_machine(hardware)
    findings += check_packages(installed, hardware, read_cann_version(machine), machine.environ)
    return hardware, tuple(findings)


def check_interpreter(
    version: tuple[int, int], path: SearchPath, package_directory: Path
) -> Iterator[Finding]:
    """Yield the findings about the Python `version` and about packages named bundle on `path`.

    `package_directory` is the directory of this package.
    """
    shown = ".".join(map(str, version))
    if version < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        yield fail("python", f"Python {shown} is older than {oldest}", f"use Python {oldest} or newer")
    else:
        yield ok("python", f"Python {shown}")
    yield from _find_other_bundles(path, package_directory)


def _find_other_bundles(path: SearchPath, package_directory: Path) -> Iterator[Finding]:
    """Yield the findings about other packages named bundle on the path of a worker.

    A worker starts as `python -m bundle` in this directory, so the first bundle on its path runs.
    """
    copies, is_behind = [], False
    for entry in path.entries:
        for name, file in (("bundle", "bundle/__init__.py"), ("bundle.py", "bundle.py")):
            if (entry.path / name).resolve() == package_directory.resolve():
                is_behind = True
            elif (entry.path / file).is_file():
                copies.append((entry.path / name, entry.origin, is_behind))
    if not copies:
        yield ok("bundle", f"workers import {package_directory}")
    for location, origin, is_harmless in copies:
        fix = f"rename or remove {location}, or start jobs from another directory"
        if is_harmless:
            cause = f"another package named bundle is at {location} ({origin}); ours comes first"
            yield warn("bundle", cause, fix)
        else:
            yield fail(
                "bundle", f"a worker would import {location} ({origin}) instead of {package_directory}", fix
            )


def check_machine(hardware: Hardware) -> Iterator[Finding]:
    """Yield the findings about the hardware itself."""
    yield ok("hardware", f"{hardware.backend}: {hardware.reason}")
    yield from _check_drivers_and_links(hardware)
    for note in hardware.notes:
        yield warn("hardware", note, "check whether this is intended")
    yield from _check_host(hardware)


def _check_drivers_and_links(hardware: Hardware) -> Iterator[Finding]:
    if not hardware.devices:
        return
    if hardware.unfit_reason:
        yield fail("hardware", hardware.unfit_reason, "use --backend cpu, which runs on every machine")
    yield _report_fact("driver", hardware.driver)
    if len(hardware.devices) > 1:
        yield _report_fact("links", hardware.link)
    ports = hardware.rdma.value or ()
    yield ok("rdma", ", ".join(ports) or hardware.rdma.reason)
    locked = hardware.host.locked_memory
    if ports and locked.value is not None and locked.value < math.inf:
        cause = (
            f"RDMA needs locked memory, but only {format_bytes(locked.value)} may be locked ({locked.reason})"
        )
        yield warn("locked memory", cause, "`ulimit -l unlimited`, docker `--ulimit memlock=-1`, or IPC_LOCK")


def _report_fact(subject: str, fact: DetectedValue[str]) -> Finding:
    if fact.value is None:
        return warn(
            subject, f"unknown: {fact.reason}", "install the vendor's tool in this container, or mount it"
        )
    return ok(subject, str(fact))


def _check_host(hardware: Hardware) -> Iterator[Finding]:
    host = hardware.host
    ranks = max(len(hardware.devices), 1)
    yield ok("memory", f"{format_bytes(host.memory.value)} ({host.memory.reason})")
    if host.processors.value is not None and host.processors.value < ranks:
        cause = f"{host.processors.value:g} processors for {ranks} ranks ({host.processors.reason})"
        yield warn("processors", cause, "raise the container's CPU limit to several processors per device")
    shared = host.shared_memory
    if shared.value is None or shared.value < ENOUGH_SHARED_MEMORY:
        cause = f"/dev/shm has {format_bytes(shared.value)} ({shared.reason})"
        fix = "docker `--shm-size=16g` or `--ipc=host`; Kubernetes: an emptyDir of medium Memory at /dev/shm"
        yield warn("shared memory", cause, fix)
    most = host.open_files
    if most.value is not None and most.value < ENOUGH_FILES:
        own_files = count_node_0_open_files(0, ranks)
        most_nodes = int(most.value - own_files) // (count_node_0_open_files(1, ranks) - own_files)
        cause = (
            f"only {most.value:g} ({most.reason}), so a job may have at most {max(most_nodes, 1)} nodes of"
            f" {ranks} ranks, as each rank and node has a connection to node 0"
        )
        yield warn("open files", cause, f"raise the hard limit (`ulimit -Hn`) to {ENOUGH_FILES} or more")


def check_packages(
    stack: InstalledPackages, hardware: Hardware, cann: DetectedValue[str], environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield the findings about torch, megatron-core and the accelerator's packages on this hardware."""
    extra = hardware.backend
    torch = stack.find_package("torch")
    if torch is None:
        fix = f"pip install 'mcore-bundle[{extra}]' (TORCH_INDEX in the README: another index for torch)"
        yield fail("torch", "not installed, so jobs cannot train here (plans and patch decisions work)", fix)
    else:
        yield ok("torch", _describe_package(torch))
        yield from _check_torch_cuda_driver(torch, hardware)
    yield from _check_torch_npu(stack, torch, hardware, cann, environ)
    yield from _check_megatron(stack, extra)
    if hardware.backend == "cuda" and stack.find_package("transformer-engine") is None:
        yield fail("transformer-engine", "not installed, but the cuda backend builds its layers from it",
                   "pip install 'mcore-bundle[cuda]'")  # fmt: skip


def _check_torch_cuda_driver(torch: Package, hardware: Hardware) -> Iterator[Finding]:
    if hardware.backend != "cuda":
        return
    source = files.read_text_if_small(torch.path / "version.py") if torch.path else None
    built = re.search(r"^cuda\b[^=]*=\s*['\"](\d+)\.\d+", source or "", re.MULTILINE)
    if built is None:
        cause = f"torch {torch.version} is built without CUDA, but this machine has NVIDIA GPUs"
        yield fail("torch", cause, "install a CUDA build of torch, or use `--backend cpu`")
        return
    floor = _OLDEST_DRIVER_BY_CUDA.get(int(built[1]))
    driver = hardware.driver.value
    if floor and driver and int(driver.split(".")[0]) < floor:
        cause = f"torch {torch.version} is for CUDA {built[1]}, which needs driver {floor} (found {driver})"
        yield fail(
            "torch",
            cause,
            "install the cuda-compat package or a newer driver, or an older CUDA build of torch",
        )


def _check_torch_npu(
    stack: InstalledPackages,
    torch: Package | None,
    hardware: Hardware,
    cann: DetectedValue[str],
    environ: Mapping[str, str],
) -> Iterator[Finding]:
    npu = stack.find_package("torch-npu")
    if npu is None:
        if hardware.backend == "ascend":
            yield fail(
                "torch-npu", "not installed, but this machine has NPUs", "pip install 'mcore-bundle[ascend]'"
            )
        return
    if hardware.backend == "cuda":
        cause = (
            f"{_describe_package(npu)} is installed next to NVIDIA GPUs, but torch supports one kind of"
            " accelerator per process"
        )
        yield fail("torch-npu", cause, "pip uninstall torch-npu, and use one environment per backend")
    elif cann.value is None and environ.get(AUTOLOAD_VARIABLE) != "0":
        cause = f"{_describe_package(npu)} without CANN makes `import torch` itself fail ({cann.reason})"
        yield fail(
            "torch-npu", cause, f"pip uninstall torch-npu, or set {AUTOLOAD_VARIABLE}=0, or install CANN"
        )
    elif (
        torch
        and (torch_minor := _parse_minor(torch))
        and (npu_minor := _parse_minor(npu))
        and torch_minor != npu_minor
    ):
        cause = f"torch-npu {npu.version} is built for another torch than {torch.version}"
        yield fail("torch-npu", cause, f"pip install 'torch-npu=={torch.base_version}.*'")
    else:
        yield ok("torch-npu", f"{_describe_package(npu)}, CANN {cann}")


def _parse_minor(package: Package) -> tuple[int, int] | None:
    return parse_minor_version(package.version or "")


def _check_megatron(stack: InstalledPackages, extra: str) -> Iterator[Finding]:
    megatron = stack.megatron
    if megatron.core is None:
        yield fail("megatron-core", "not installed", f"pip install 'mcore-bundle[{extra}]'")
        return
    core = stack.find_package("megatron-core")
    assert core is not None
    if megatron.core_training_mismatch:
        yield fail(
            "megatron-core",
            megatron.core_training_mismatch,
            "put one tree first on PYTHONPATH, or uninstall the other",
        )
    elif len(megatron.copies) > 1:
        hidden = ", ".join(
            f"{c.root} ({c.version}, {c.origin})" for c in megatron.copies if c is not megatron.core
        )
        cause = f"{len(megatron.copies)} copies on the path; {megatron.core.root} is imported, not {hidden}"
        yield warn("megatron-core", cause, "uninstall the copies that no job uses")
    else:
        yield ok("megatron-core", _describe_package(core))
    if core.base_version is None:
        return
    version = Version(core.base_version)
    if not SUPPORTED_MEGATRON[0] <= version < SUPPORTED_MEGATRON[1]:
        cause = (
            f"{core.version} is outside {SUPPORTED_MEGATRON[0]} to {SUPPORTED_MEGATRON[1]}: no"
            " patch was reviewed for it"
        )
        yield warn("megatron-core", cause, "see `mcore-bundle patches plan`, or install a supported release")
    needs_triton, evidence = detect_megatron_triton_import(megatron.core.root, version)
    if needs_triton and stack.find_package("triton") is None:
        cause = f"not installed, and megatron-core {core.version} imports it on every machine ({evidence})"
        yield fail("triton", cause, f"pip install {get_triton_distribution(extra)}")


def _describe_package(package: Package) -> str:
    commit = f" at {package.commit[:12]}" if package.commit else ""
    return f"{package.name} {package.version or 'of unknown version'}{commit} in {package.path}"
