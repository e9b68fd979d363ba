"""The aten kernels of torch-npu, computed by the cpu's over the same memory."""

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.npu.emulation.memory import NPU, alias, differentiable, on_cpu, on_npu, to_npu

called: Counter[str] = Counter()
"""How often each kernel was called that stands for what a backend chooses, torch-npu's own operators too."""

_library = torch.library.Library("aten", "IMPL")
# Memory and views of it, which torch-npu makes itself, with the stand-in's memory.
_KEPT = frozenset(
    ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted", "as_strided",
     "view", "_reshape_alias", "set_", "resize_", "record_stream", "is_pinned", "pin_memory", "_pin_memory",
     "_local_scalar_dense", "_unsafe_view", "detach", "alias", "unfold", "is_set_to", "_resize_output_",
     "_resize_output", "_has_compatible_shallow_copy_type", "_efficientzerotensor")
)  # fmt: skip
# What takes tensors of the cpu beside those of a device, of any size: indices.
_MIXED = frozenset(("index", "index_put", "index_put_", "_index_put_impl_"))


class WrongDevice(RuntimeError):
    """Operands on two devices, which the real kernels refuse."""


def install() -> int:
    """Takes the place of every aten kernel of torch-npu; returns their number."""
    warnings.filterwarnings("ignore", message=".*[Oo]verrid.*")
    taken = 0
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
        space, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if space != "aten" or base in _KEPT or "npu" in base:
            continue
        operator = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if operator is not None:  # torch-npu registers names that this torch has not, too
            kernel = _SPECIAL.get(rest) or _through(operator, mixed=base in _MIXED)
            _library.impl(rest, kernel, "PrivateUse1", allow_override=True)
            taken += 1
    return taken


def _through(operator: Any, *, mixed: bool) -> Callable[..., Any]:
    """The kernel that gives the cpu's the same memory; what is written in place comes back as it came."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        if not mixed:
            _refuse_two_devices(operator, leaves)
        given: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of what the cpu's kernel gets

        def lower(value: Any) -> Any:
            if isinstance(value, torch.device) and value.type == NPU:
                return torch.device("cpu")
            if isinstance(value, Tensor):
                below = on_cpu(value)
                given[id(below)] = (below, value)
                return below
            return value

        def raised(value: Any) -> Any:
            if isinstance(value, Tensor) and id(value) in given:
                return given[id(value)][1]
            return to_npu(value, device)

        device = next((x.device for x in leaves if on_npu(x)), None) or next(
            (x for x in leaves if isinstance(x, torch.device)), NPU
        )
        args, kwargs = tree_map(lower, args), tree_map(lower, kwargs)
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        with torch.no_grad():
            return tree_map(raised, operator(*args, **kwargs))

    return kernel


def _refuse_two_devices(operator: Any, leaves: list[Any]) -> None:
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if any(map(on_npu, tensors)) and any(x.device.type == "cpu" and x.dim() for x in tensors):
        where = ", ".join(f"{list(x.shape)} on {x.device}" for x in tensors)
        raise WrongDevice(f"emulated: {operator} of {where}: expected all tensors to be on the same device")


def _to_copy(
    x: Tensor,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Tensor:
    device = torch.device(device) if device is not None else x.device
    kept = torch.preserve_format if memory_format is None else memory_format
    made = on_cpu(x).to(dtype=dtype or x.dtype, copy=True, memory_format=kept)
    return to_npu(made, device) if device.type == NPU else made.to(device)


def _copy_(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    on_cpu(x).copy_(on_cpu(source))
    return x


def _fused_adamw_(*lists: list[Tensor], **options: Any) -> None:
    """torch's own kernel, whose counts of steps are on the device too; counted as torch-npu's own are."""
    called["_fused_adamw_"] += 1
    _refuse_two_devices("aten::_fused_adamw_", [x.flatten() for each in lists for x in each])
    torch.ops.aten._fused_adamw_(*tree_map(on_cpu, lists), **options)


def _matmul_backward(gradient: Tensor, one: Tensor, other: Tensor, mask: list[bool]) -> tuple[Any, ...]:
    with differentiable():
        inputs = [alias(x).detach().clone().requires_grad_() for x in (one, other)]
        found = torch.autograd.grad(torch.matmul(*inputs), inputs, alias(gradient))
    return tuple(to_npu(g, one.device) if wanted else None for g, wanted in zip(found, mask, strict=True))


_SPECIAL: dict[str, Callable[..., Any]] = {
    "_to_copy": _to_copy,
    "copy_": _copy_,
    "matmul_backward": _matmul_backward,
    "_fused_adamw_": _fused_adamw_,
}
