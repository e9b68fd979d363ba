"""Which backend a machine calls for. Nothing is imported from a framework: its answer changes with what it
patches.
"""

from collections.abc import Sequence

from bundle.errors import EnvironmentUnfit
from bundle.hardware.facts import Fact, Hardware
from bundle.hardware.found import Found
from bundle.hardware.host import host
from bundle.hardware.links import rdma
from bundle.hardware.machine import Machine, local
from bundle.hardware.visible import ASCEND, CUDA

BACKENDS = ("auto", "cpu", "cuda", "ascend")


def detect(backend: str = "auto", machine: Machine | None = None) -> Hardware:
    """The hardware of a machine for a backend; `auto` takes the accelerator that is there, else the CPU.

    Raises EnvironmentUnfit if both kinds of accelerator are visible, if a visibility variable is one that the
    driver refuses, or if the wanted backend has no device here.
    """
    machine = machine or local()
    if backend == "cpu":
        return _cpu(machine, "asked for: accelerators are not looked at")
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is none of {', '.join(BACKENDS)}")
    # A job on the cpu, such as the demo, needs nothing of what knows the vendors' tools.
    from bundle.hardware import ascend, nvidia

    found = [vendor.find(machine) for vendor in (nvidia, ascend)]
    wanted = [side for side in found if backend in ("auto", side.backend)]
    if faults := [fault for side in wanted for fault in side.faults]:
        raise EnvironmentUnfit("a visible-device variable cannot be used", faults)
    usable = [side for side in wanted if side.devices]
    if len(usable) > 1:
        raise EnvironmentUnfit(_both(usable))
    if usable:
        return _accelerated(machine, usable[0])
    if backend != "auto":
        raise EnvironmentUnfit(f"backend {backend} has no device here: {_why_none(wanted)}")
    return _cpu(machine, _why_none(wanted))


def _accelerated(machine: Machine, side: Found) -> Hardware:
    shown = f"{len(side.devices)} of {side.present} {side.noun}s ({side.devices[0].name}); {side.reason}"
    return Hardware(
        backend=side.backend,
        reason=shown,
        devices=side.devices,
        driver=side.driver,
        toolkit=side.toolkit,
        link=side.link,
        rdma=rdma(machine),
        host=host(machine),
        notes=side.notes,
    )


def _cpu(machine: Machine, reason: str) -> Hardware:
    none: Fact[str] = Fact(None, "no accelerator in use")
    return Hardware("cpu", reason, (), none, none, none, rdma(machine), host(machine))


def _why_none(sides: Sequence[Found]) -> str:
    return "; ".join(
        f"{side.present} {side.noun}s are hidden: {side.reason}" if side.present else side.reason
        for side in sides
    )


def _both(sides: Sequence[Found]) -> str:
    seen = " and ".join(f"{len(side.devices)} {side.noun}s" for side in sides)
    return (
        f"this machine shows {seen}: torch refuses two kinds of accelerator in one process. Say which with "
        f"`backend: cuda` or `backend: ascend` in the recipe (or --backend), and hide the others from torch: "
        f"{ASCEND}= (empty) for CUDA, {CUDA}= (empty) for Ascend"
    )
