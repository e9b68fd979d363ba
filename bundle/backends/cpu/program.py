"""A whole program of somebody else that expects GPUs, like Megatron-LM's pretrain_gpt.py, on the cpu.

    start()              # before the program imports megatron
    with megatron_calls(): ...

Our own engine says what it needs of the cpu; such a program asks torch for GPUs and NCCL, compiles kernels
and takes megatron's own layers. So here, unlike under `facade` alone, `torch.cuda.is_available()` is True.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from bundle.backends.cpu import facade
from bundle.backends.cpu.emulation import megatron_calls

__all__ = ["megatron_calls", "start"]

_GENERATION = (8, 0)  # the least that bf16 is asked for
# Kernels that are compiled with nvcc at the start (to 0.16), although nothing is left that calls them.
_COMPILED = "megatron.legacy.fused_kernels"


def start() -> None:
    """Makes this process one whose GPUs are the cpu, for as long as it lives.

    Raises EnvironmentUnfit where a GPU is visible, or megatron or a library for GPUs was imported already.
    """
    facade.hide_gpu_libraries()
    facade.install()
    for name, stand_in in _DEVICES.items():
        setattr(torch.cuda, name, stand_in)
    for name in ("init_process_group", "new_group"):
        setattr(dist, name, _over_gloo(getattr(dist, name)))
    sys.modules.setdefault(_COMPILED, _no_kernels())
    _take_layers()


def _nothing(*args: Any, **kwargs: Any) -> None: ...


_DEVICES: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    "set_device": _nothing,
    "set_stream": _nothing,
    "empty_cache": _nothing,
    "get_device_capability": lambda device=None: _GENERATION,
    "get_device_properties": lambda device=None: SimpleNamespace(
        name="cpu", major=_GENERATION[0], minor=_GENERATION[1], multi_processor_count=1, total_memory=0
    ),
}


def _over_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch.distributed that makes a group: gloo where NCCL is asked for, and no device."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        said = bound.arguments
        if "nccl" in str(said.get("backend") or ""):
            said["backend"] = "gloo"
        said.pop("device_id", None)
        return original(*bound.args, **bound.kwargs)

    return call


def _no_kernels() -> ModuleType:
    """A module in the place of the one that compiles kernels."""
    module = ModuleType(_COMPILED)
    module.load = _nothing  # type: ignore[attr-defined]
    return module


def _take_layers() -> None:
    """Puts the cpu's layers under the names of megatron's: attention over ranks and packs, split norms.

    They import megatron, which must meet the facade.
    """
    from megatron.core.transformer import dot_product_attention, torch_norm

    from bundle.backends.cpu.attention import CoreAttention
    from bundle.backends.local import Norm

    taken = {dot_product_attention.DotProductAttention: CoreAttention, torch_norm.WrappedTorchNorm: Norm}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "megatron":
            for attribute, value in list(vars(module).items()):
                if isinstance(value, type) and value in taken:
                    setattr(module, attribute, taken[value])
