"""Machines to plan for without having them: one node of a product, with numbers read off one."""

from bundle.errors import UsageError
from bundle.hardware.facts import Device, Fact, Hardware, Host

MIB = 2**20

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
