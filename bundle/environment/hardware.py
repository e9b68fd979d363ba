"""The hardware to plan for: what this machine has and which backend it calls for, or a machine that is named.

Nothing is imported from a framework: its answer changes with what it patches.
"""

from collections.abc import Sequence

from bundle.environment import BACKENDS, ascend, nvidia
from bundle.environment.host import host, rdma
from bundle.environment.machine import Device, Fact, Hardware, Host, Machine, VendorDevices, local
from bundle.errors import EnvironmentUnfit, UsageError

CHOICES = ("auto", *BACKENDS)

MIB = 2**20

# Machines to plan for without having them: one node of a product, with numbers read off one.
# name -> (backend, devices per node, device name, generation, memory in MiB, link, source of the numbers);
# no link where nobody's matrix of such a node was at hand.
_NODES: dict[str, tuple[str, int, str, str, int, str | None, str]] = {
    "a100": ("cuda", 8, "NVIDIA A100-SXM4-80GB", "8.0", 81920, None, "modal-labs/modal-client#2797"),
    "h100": (
        "cuda", 8, "NVIDIA H100 80GB HBM3", "9.0", 81559, "NV18",
        "nvidia-smi: modal-labs/modal-client#2797; topo -m: NVIDIA/nccl#1264",
    ),
    "h200": ("cuda", 8, "NVIDIA H200", "9.0", 143771, "NV18", "nvidia-smi, driver 580.159.04"),
    "b200": ("cuda", 8, "NVIDIA B200", "10.0", 182630, None, "device query, 178.35 GiB: pytorch/ao#4002"),
    "a2": ("ascend", 8, "910B2C", "a2", 65536, None, "npu-smi: vllm-project/vllm-ascend#676"),
    "a3": ("ascend", 16, "Ascend910", "a3", 65536, None, "npu-smi: vllm-project/vllm-ascend#2035"),
}  # fmt: skip

NAMES = (*_NODES, "cpu")


def detect(backend: str = "auto", machine: Machine | None = None) -> Hardware:
    """The hardware of a machine for a backend; `auto` takes the accelerator that is there, else the CPU.

    Raises EnvironmentUnfit if both kinds of accelerator are visible, if a visibility variable is one that the
    driver refuses, or if the wanted backend has no device here.
    """
    machine = machine or local()
    if backend == "cpu":
        return _cpu(machine, "asked for: accelerators are not looked at")
    if backend not in CHOICES:
        raise ValueError(f"backend {backend!r} is none of {', '.join(CHOICES)}")
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


def _accelerated(machine: Machine, side: VendorDevices) -> Hardware:
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


def _why_none(sides: Sequence[VendorDevices]) -> str:
    return "; ".join(
        f"{side.present} {side.noun}s are hidden: {side.reason}" if side.present else side.reason
        for side in sides
    )


def _both(sides: Sequence[VendorDevices]) -> str:
    seen = " and ".join(f"{len(side.devices)} {side.noun}s" for side in sides)
    return (
        f"this machine shows {seen}: torch refuses two kinds of accelerator in one process. Say which with "
        f"`backend: cuda` or `backend: ascend` in the recipe (or --backend), and hide the others from torch: "
        f"{ascend.VISIBLE}= (empty) for CUDA, {nvidia.VISIBLE}= (empty) for Ascend"
    )


def preset(name: str, per_node: int | None = None) -> Hardware:
    """The hardware called `name`, with `per_node` devices instead of the product's own number. Raises
    UsageError.
    """
    unknown: Fact[float] = Fact(None, f"--hardware {name} says nothing about the host")
    host = Host(unknown, unknown, unknown, unknown, unknown, unknown)
    none: Fact[str] = Fact(None, "not known of a machine that is only named")
    ports: Fact[tuple[str, ...]] = Fact(None, none.reason)
    if name == "cpu":
        return Hardware("cpu", "--hardware cpu", (), none, none, none, ports, host)
    if name not in _NODES:
        raise UsageError(f"no hardware is called {name!r}; choose one of {', '.join(NAMES)}")
    backend, own, device, generation, memory, link, source = _NODES[name]
    count = own if per_node is None else per_node
    return Hardware(
        backend=backend,
        reason=f"--hardware {name}: {count} x {device}",
        devices=tuple(
            Device(i, i, device, f"{name}-{i}", Fact(memory * MIB, source), Fact(generation, source))
            for i in range(count)
        ),
        driver=none,
        toolkit=none,
        link=Fact(link, source),
        rdma=ports,
        host=host,
    )
