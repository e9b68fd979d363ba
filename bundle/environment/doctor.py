"""Whether this machine and what is installed on it can run a job: findings with a cause and a fix each.

In the order a reader asks: interpreter, image, machine, packages.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import bundle
from bundle.environment.ascend import cann
from bundle.environment.compatibility import package_findings
from bundle.environment.facts import Fact, Finding, Hardware, fail, ok, warn
from bundle.environment.hardware import detect
from bundle.environment.image import image_findings
from bundle.environment.machine import Machine
from bundle.environment.packages import Stack
from bundle.environment.search import SearchPath
from bundle.errors import EnvironmentUnfit, bytes_shown

OLDEST = (3, 11)  # of Python; pyproject.toml, requires-python
# Ranks of one node exchange through /dev/shm where they have no peer access, and data workers always do.
ENOUGH_SHARED_MEMORY = 2**30
# A rank holds a socket per peer and group, and a descriptor per data shard.
ENOUGH_FILES = 4096


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
        return None, (*findings, *_unfit(error))
    findings += machine_findings(hardware)
    findings += package_findings(installed, hardware, cann(machine), machine.environ)
    return hardware, tuple(findings)


def _unfit(error: EnvironmentUnfit) -> Iterator[Finding]:
    for cause in error.violations or (str(error),):
        yield fail("hardware", cause, "do what the line says, then run doctor again")


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
    found = [(entry.path / name, entry.origin) for entry in path.entries for name in ("bundle", "bundle.py")]
    others = [(place, origin) for place, origin in found if _importable(place) and not _same(place, own)]
    position = {place: index for index, (place, _) in enumerate(found)}
    mine = next((index for place, index in position.items() if _same(place, own)), len(found))
    if not others:
        yield ok("bundle", f"workers import {own}")
    for place, origin in others:
        fix = f"rename or remove {place}, or start jobs from another directory"
        if position[place] > mine:
            yield warn(
                "bundle", f"a second package of that name at {place} ({origin}); ours comes first", fix
            )
        else:
            yield fail("bundle", f"a worker would import {place} ({origin}) instead of {own}", fix)


def _importable(place: Path) -> bool:
    return place.is_file() if place.suffix else (place / "__init__.py").is_file()


def _same(place: Path, own: Path) -> bool:
    return place.resolve() == own.resolve()


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
    files = host.open_files
    if files.value is not None and files.value < ENOUGH_FILES:
        yield warn(
            "open files", f"only {files.value:g} ({files.reason})", f"`ulimit -n {ENOUGH_FILES}` or more"
        )
