"""The devices and what the container leaves of the host: shared memory, limits, processors."""

import math
from collections.abc import Iterator

from bundle.hardware import Fact, Hardware
from bundle.health.finding import Finding, fail, ok, warn

GIB = 2**30
# Ranks of one node exchange through /dev/shm where they have no peer access, and data workers always do.
ENOUGH_SHARED_MEMORY = GIB
# A rank holds a socket per peer and group, and a descriptor per data shard.
ENOUGH_FILES = 4096


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
        cause = f"RDMA registers memory, and only {_size(locked.value)} may be locked ({locked.reason})"
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
    yield ok("memory", f"{_size(host.memory.value)} ({host.memory.reason})")
    if host.processors.value is not None and host.processors.value < ranks:
        cause = f"{host.processors.value:g} processors for {ranks} ranks ({host.processors.reason})"
        yield warn("processors", cause, "raise the container's cpu limit to a few per device")
    shared = host.shared_memory
    if shared.value is None or shared.value < ENOUGH_SHARED_MEMORY:
        cause = f"/dev/shm has {_size(shared.value)} ({shared.reason})"
        fix = "docker `--shm-size=16g` or `--ipc=host`; Kubernetes: an emptyDir of medium Memory at /dev/shm"
        yield warn("shared memory", cause, fix)
    files = host.open_files
    if files.value is not None and files.value < ENOUGH_FILES:
        yield warn(
            "open files", f"only {files.value:g} ({files.reason})", f"`ulimit -n {ENOUGH_FILES}` or more"
        )


def _size(amount: float | None) -> str:
    if amount is None:
        return "an unknown size"
    if amount == math.inf:
        return "no limit"
    for unit, size in (("GiB", GIB), ("MiB", 2**20)):
        if amount >= size:
            return f"{amount / size:.3g} {unit}"
    return f"{amount / 1024:.3g} KiB"
