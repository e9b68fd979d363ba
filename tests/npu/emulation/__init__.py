"""Emulated NPUs: the real torch-npu over stand-in libraries, with kernels and collectives of the cpu.

Every process that finds `plugin` on its path has them as soon as it imports torch: torch loads what is
declared as a device backend, torch-npu and this. The bundle knows nothing of it.

aten's operators are the cpu's, over the same memory; torch-npu's own are references that check the documented
contract under torch-npu's schemas and its autograd; in HCCL's place is gloo, with HCCL's refusals. So it says
nothing of accuracy, speed, memory, streams, dropout, of what a kernel refuses beyond its documentation, and
of HCCL itself.
"""

from pathlib import Path


def start() -> None:
    """Puts the emulation under torch-npu, in this process."""
    import torch_npu  # noqa: F401

    from tests.npu.emulation import aten, cann, collectives, kernels

    aten.install()
    kernels.install()
    collectives.install()
    cann.install()


def plugin(directory: Path) -> Path:
    """`directory`, as what must be on PYTHONPATH for torch to load the emulation."""
    declared = directory / "emulated_npu-0.dist-info"
    declared.mkdir(parents=True)
    (declared / "METADATA").write_text("Metadata-Version: 2.1\nName: emulated-npu\nVersion: 0\n")
    (declared / "entry_points.txt").write_text("[torch.backends]\nemulated_npu = tests.npu.emulation:start\n")
    return directory
