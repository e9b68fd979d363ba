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

_COMPUTE_CAPABILITY = (8, 0)  # the least that bf16 is asked for
# Kernels that are compiled with nvcc at the start (to 0.16), although nothing is left that calls them.
_LEGACY_FUSED_KERNELS = "megatron.legacy.fused_kernels"


def start() -> None:
    """Make the cpu stand in for all GPUs of this process, for as long as it lives.

    Raises EnvironmentUnfit where a GPU is visible, or megatron or a library for GPUs was imported already.
    """
    facade.hide_gpu_libraries()
    facade.install()
    for name, stand_in in _DEVICE_FUNCTIONS.items():
        setattr(torch.cuda, name, stand_in)
    for name in ("init_process_group", "new_group"):
        setattr(dist, name, _use_gloo(getattr(dist, name)))
    sys.modules.setdefault(_LEGACY_FUSED_KERNELS, _build_fused_kernels_stub())
    _replace_attention_and_norm()


def _do_nothing(*args: Any, **kwargs: Any) -> None: ...


_DEVICE_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    "set_device": _do_nothing,
    "set_stream": _do_nothing,
    "empty_cache": _do_nothing,
    "get_device_capability": lambda device=None: _COMPUTE_CAPABILITY,
    "get_device_properties": lambda device=None: SimpleNamespace(
        name="cpu",
        major=_COMPUTE_CAPABILITY[0],
        minor=_COMPUTE_CAPABILITY[1],
        multi_processor_count=1,
        total_memory=0,
    ),
}


def _use_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `original`, which makes a process group, with gloo instead of NCCL and without a device."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        arguments = bound.arguments
        if "nccl" in str(arguments.get("backend") or ""):
            arguments["backend"] = "gloo"
        arguments.pop("device_id", None)
        return original(*bound.args, **bound.kwargs)

    return call


def _build_fused_kernels_stub() -> ModuleType:
    """Return a module that stands in for the one that compiles kernels."""
    module = ModuleType(_LEGACY_FUSED_KERNELS)
    module.load = _do_nothing  # type: ignore[attr-defined]
    return module


def _replace_attention_and_norm() -> None:
    """Put the cpu's layers under megatron's names: attention over ranks and packs, split norms.

    They import megatron, which must meet the facade.
    """
    from megatron.core.transformer import dot_product_attention, torch_norm

    from bundle.backends.cpu.attention import CpuCoreAttention
    from bundle.backends.local import LocalNorm

    replacements = {
        dot_product_attention.DotProductAttention: CpuCoreAttention,
        torch_norm.WrappedTorchNorm: LocalNorm,
    }
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "megatron":
            for attribute, value in list(vars(module).items()):
                if isinstance(value, type) and value in replacements:
                    setattr(module, attribute, replacements[value])
