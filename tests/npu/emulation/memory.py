"""An emulated NPU's memory is this machine's: the same bytes as a tensor of the cpu, and back."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

NPU = "npu"


def on_npu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NPU


def alias(tensor: Tensor) -> Tensor:
    """A cpu tensor over the bytes of one of an emulated NPU, which it keeps alive."""
    storage = tensor.untyped_storage()
    if not storage.nbytes() or not storage.data_ptr():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(
        whole, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def on_cpu(value: Any) -> Any:
    """`alias` of an emulated NPU's tensor; anything else as it is."""
    return alias(value) if on_npu(value) else value


def to_npu(value: Any, device: Any = NPU) -> Any:
    """A copy of a cpu tensor on the emulated device; anything else as it is."""
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    if value.numel():
        alias(made).copy_(value)
    return made


@contextmanager
def differentiable() -> Iterator[None]:
    """Autograd on the cpu inside a kernel, below autograd, where its keys are shut off."""
    shut = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradCPU", "AutogradOther", "ADInplaceOrView"):
        shut = shut.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, shut), torch.enable_grad():
        yield
