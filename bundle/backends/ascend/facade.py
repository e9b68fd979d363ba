"""What is replaced in torch beside what torch-npu's transfer_to_npu replaces, before megatron is imported.

For the life of the process, as that is; `capabilities.ascend.FACADE` says what, and why.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from bundle.backends.compiling import eager_for_megatron
from bundle.capabilities.ascend import FACADE

_GENERATION = (8, 0)  # the least that bf16 is asked for
_installed: list[str] = []


def install() -> None:
    """Replaces the attributes that FACADE names; does nothing if they are replaced already."""
    if _installed:
        return
    made = {
        "torch:compile": eager_for_megatron(torch.compile, lambda: True),
        "torch:Tensor.type": _named_as_cuda(torch.Tensor.type),
        "torch:cuda.get_device_capability": lambda device=None: _GENERATION,
    }
    for target in FACADE:
        *path, name = target.partition(":")[2].split(".")
        setattr(functools.reduce(getattr, path, torch), name, made[target])
        _installed.append(target)


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
