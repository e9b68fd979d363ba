"""gloo in HCCL's place, over the same memory, with what torch-npu's ProcessGroupHCCL refuses.

Read from its source: the element types that it reduces, the reductions that it has not, tensors of the cpu.
HCCL itself is not here: its time limits, rank tables, links, and its order on streams.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.npu.emulation.memory import NPU, on_cpu

_REDUCING = frozenset(
    ("allreduce_", "allreduce_coalesced_", "reduce_", "reduce_scatter_", "_reduce_scatter_base_",
     "reduce_scatter_tensor_coalesced_")
)  # fmt: skip
_MOVING = frozenset(
    ("broadcast_", "allgather_", "_allgather_base_", "allgather_coalesced_", "alltoall_", "alltoall_base_",
     "allgather_into_tensor_coalesced_", "gather_", "scatter_", "send", "recv_", "recv_any_source_",
     "barrier")
)  # fmt: skip
# ProcessGroupHCCL::checkSupportedDataType for A2 and A3; Atlas A5 reduces float64 and uint64 too.
_REDUCED = frozenset(
    (torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32)
)
_BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
_library = torch.library.Library("c10d", "IMPL")


class Refused(RuntimeError):
    """What ProcessGroupHCCL does not take."""


class Hccl(dist.ProcessGroupGloo):
    """A group for NPUs alone, as HCCL's is; `beneath` is the group of the cpu that does the work.

    torch has no side of the cpu here and says so itself: "No backend type associated with device type cpu".
    """

    kept: ClassVar[
        list["Hccl"]
    ] = []  # pybind gives this object back, and not a bare gloo group, while it lives

    def __init__(self, options: Any) -> None:
        size, rank = options.group_size, options.group_rank
        super().__init__(options.store, rank, size, timeout=options.timeout)
        self.beneath = dist.ProcessGroup(options.store, rank, size)
        self.beneath._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self)
        self.kept.append(self)

    # torch-npu calls these on its own group, past torch's dispatcher: for dist.gather, and for exchanges.

    def allgather(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        return super().allgather(tree_map(on_cpu, outputs), tree_map(on_cpu, inputs), *options)

    def gather(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        return super().gather(tree_map(on_cpu, outputs), tree_map(on_cpu, inputs), *options)

    def batch_isend_irecv(self, kinds: Sequence[str], tensors: Sequence[Tensor], peers: Sequence[int]) -> Any:
        started = [
            getattr(self, "send" if kind == "isend" else "recv")([on_cpu(tensor)], peer, 0)
            for kind, tensor, peer in zip(kinds, tensors, peers, strict=True)
        ]
        return _All(started)


class _All:
    """Several transfers as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self.works = works

    def wait(self, *_: Any) -> bool:
        for work in self.works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


def install() -> None:
    """Puts it where torch-npu has registered HCCL."""
    for name in sorted(_REDUCING | _MOVING):
        if packet := getattr(torch.ops.c10d, name, None):
            _library.impl(name, _through(name, packet.default), "PrivateUse1", allow_override=True)
    for name in ("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base",
                 "reduce_scatter_tensor_coalesced"):  # fmt: skip
        setattr(dist.ProcessGroup, name, _without_bitwise(name, getattr(dist.ProcessGroup, name)))
    dist.Backend._plugins["HCCL"] = dist.Backend._BackendPlugin(lambda options, *_: Hccl(options), True)


def _through(name: str, operator: Any) -> Callable[..., Any]:
    at = [argument.name for argument in operator._schema.arguments].index("process_group")

    def kernel(*args: Any) -> Any:
        for tensor in tree_leaves(args):
            if isinstance(tensor, Tensor):
                _check(name, tensor)
        group = dist.ProcessGroup.unbox(args[at])._get_backend(torch.device(NPU))
        lower = list(tree_map(on_cpu, args))
        lower[at] = group.beneath.boxed()
        found = operator(*lower)
        # Tensors come back as they were given: each of these works in place of its first argument.
        return (args[0], *found[1:]) if isinstance(found, tuple) else found

    return kernel


def _check(name: str, tensor: Tensor) -> None:
    if name in _REDUCING and tensor.dtype not in _REDUCED:
        raise Refused(f"emulated HCCL {name}: Unsupported data type {tensor.dtype}")
    if tensor.device.type != NPU or not tensor.is_contiguous():
        raise Refused(f"emulated HCCL {name}: Tensors must be NPU and dense")


def _without_bitwise(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a group that refuses the reductions that HCCL has not."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = (getattr(given, "reduceOp", given) for given in (*args, *kwargs.values()))
        kinds = [kind for kind in asked if isinstance(kind, (dist.ReduceOp, dist.ReduceOp.RedOpType))]
        if any(kind == bitwise for kind in kinds for bitwise in _BITWISE) and NPU in {
            device.type for device in self._device_types
        }:
            raise Refused(f"emulated HCCL {name}: Unsupported reduction {kinds[0]}")
        return original(self, *args, **kwargs)

    return call
