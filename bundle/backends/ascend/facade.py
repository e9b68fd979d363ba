"""What is replaced beside what torch-npu's transfer_to_npu replaces: in torch first, then in megatron.

For the life of the process, as that is; `capabilities.ascend.FACADE` says what, and why.
"""

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from bundle.backends.ascend.operators import operator
from bundle.backends.compiling import eager_for_megatron
from bundle.capabilities.ascend import FACADE

_GENERATION = (8, 0)  # the least that bf16 is asked for
_installed: list[str] = []


def install() -> None:
    """Replaces the attributes that FACADE names; does nothing if they are replaced already.

    Megatron is imported on the way, when what it binds of torch stands.
    """
    if _installed:
        return
    _replace(target for target in FACADE if target.startswith("torch:"))
    from megatron.core.fusions import fused_bias_swiglu  # noqa: F401

    _replace(target for target in FACADE if target.startswith("megatron."))


def _replace(targets: Iterable[str]) -> None:
    for target in targets:
        module, _, attribute = target.partition(":")
        *path, name = attribute.split(".")
        owner = functools.reduce(getattr, path, sys.modules[module])
        setattr(owner, name, _REPLACEMENTS[target](getattr(owner, name)))
        _installed.append(target)


def _generation(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda device=None: _GENERATION


def _swiglu(original: Callable[..., Any]) -> Callable[..., Any]:
    """[.., f] from both halves [.., 2f]; the operator takes nothing empty, like an idle expert's rows."""

    @functools.wraps(original)
    def swiglu(y: torch.Tensor) -> Any:
        return operator("npu_swiglu")(y.contiguous(), -1) if y.numel() else original(y)

    return swiglu


def _swiglu_back(original: Callable[..., Any]) -> Callable[..., Any]:
    """[.., 2f]; the gradient behind a router's weight is float32, and the operator takes one type."""

    @functools.wraps(original)
    def swiglu_back(g: torch.Tensor, y: torch.Tensor) -> Any:
        if not y.numel():
            return original(g, y)
        wide = torch.promote_types(g.dtype, y.dtype)
        return operator("npu_swiglu_backward")(g.to(wide).contiguous(), y.to(wide).contiguous(), -1)

    return swiglu_back


def _named_as_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Tensor.type with CUDA's names for an NPU's types, both ways."""

    @functools.wraps(original)
    def type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return original(self).replace("torch.npu.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.npu.", 1)
        return original(self, dtype, *args, **kwargs)

    return type


_SWIGLU = "megatron.core.fusions.fused_bias_swiglu"
_REPLACEMENTS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "torch:compile": lambda original: eager_for_megatron(original, lambda: True),
    "torch:Tensor.type": _named_as_cuda,
    "torch:cuda.get_device_capability": _generation,
    f"{_SWIGLU}:swiglu": _swiglu,
    f"{_SWIGLU}:swiglu_back": _swiglu_back,
}
