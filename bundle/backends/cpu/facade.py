"""The facade on torch.cuda: with it megatron-core runs on a cpu. Installs and uninstalls exactly.

    facade.install()              # before the first import of megatron
    with megatron_calls(): ...    # around whatever executes megatron's code
    facade.uninstall()

`torch.cuda.is_available()` stays False. Only the names of `capabilities.cpu.REPLACEMENT_REASON_BY_TORCH_NAME`
are replaced. Other libraries of the process (transformers, an evaluation) still choose the cpu by themselves.
What megatron bound by value at import keeps our objects after `uninstall`; they are stateless.
"""

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bundle.backends.compiling import exempt_megatron_from_compile
from bundle.backends.cpu import collectives, emulation
from bundle.backends.cpu.emulation import has_entered_megatron_calls, megatron_calls, wrap_autograd_engine
from bundle.capabilities.cpu import REPLACEMENT_REASON_BY_TORCH_NAME
from bundle.errors import EnvironmentUnfit

__all__ = ["hide_gpu_libraries", "install", "is_installed", "megatron_calls", "uninstall"]

# Megatron takes their optimizer and gradient clipping wherever they can be imported; none takes a cpu tensor.
_GPU_LIBRARIES = ("transformer_engine", "apex")
_originals: dict[str, Any] = {}
# Every fork of a random state warns that the cpu's state changed with the device's: here they are one.
_MEGATRON_RNG_LOGGER = logging.getLogger("megatron.core.tensor_parallel.random")


def _is_not_rng_warning(record: logging.LogRecord) -> bool:
    return "RNG state changed" not in record.msg


def is_installed() -> bool:
    """True between `install` and `uninstall`."""
    return bool(_originals)


def _dispatch_megatron_calls(
    stand_in: Callable[..., Any], original: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that is `stand_in` in megatron's calls and `original` outside.

    It is for functions that have a meaning without a GPU too.
    """

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (stand_in if has_entered_megatron_calls() else original)(*args, **kwargs)

    return call


@functools.cache
def _build_replacements() -> dict[str, Any]:
    """Return the stand-in of each target.

    They are the same objects at every installation, since megatron binds some at import.
    """
    return {
        "torch.cuda:current_device": emulation.current_device,
        "torch.cuda:device": emulation.DeviceContext,
        "torch.cuda:synchronize": emulation.synchronize,
        "torch.cuda:Stream": emulation.Stream,
        "torch.cuda:Event": emulation.Event,
        "torch.cuda:current_stream": emulation.current_stream,
        "torch.cuda:stream": emulation.stream,
        "torch.cuda:default_generators": emulation.Generators(),
        "torch.cuda:manual_seed": _dispatch_megatron_calls(emulation.manual_seed, torch.cuda.manual_seed),
        "torch.cuda:get_rng_state": emulation.get_rng_state,
        "torch.cuda:set_rng_state": emulation.set_rng_state,
        "torch.cuda.random:get_rng_state": emulation.get_rng_state,
        "torch.cuda:_lazy_call": _dispatch_megatron_calls(emulation.lazy_call, torch.cuda._lazy_call),
        "torch.cuda:_lazy_init": _dispatch_megatron_calls(emulation.lazy_init, torch.cuda._lazy_init),
        "torch.autograd:_engine_run_backward": wrap_autograd_engine(torch.autograd._engine_run_backward),
        "torch.distributed:all_gather": _dispatch_megatron_calls(collectives.all_gather, dist.all_gather),
        "torch.distributed:reduce_scatter": _dispatch_megatron_calls(
            collectives.reduce_scatter, dist.reduce_scatter
        ),
        "torch:compile": exempt_megatron_from_compile(torch.compile, is_installed),
    }


def _find_owner(target: str) -> tuple[Any, str]:
    module, _, name = target.partition(":")
    return sys.modules[module], name  # parts of torch, which has imported them


def install() -> None:
    """Replace the targets of `capabilities.cpu.REPLACEMENT_REASON_BY_TORCH_NAME`, unless they are replaced.

    Raises EnvironmentUnfit where a GPU is visible, or where megatron was imported before.
    """
    if is_installed():
        return
    if torch.cuda.is_available():
        raise EnvironmentUnfit(
            "backend cpu: torch sees a CUDA device, which this backend can hide only in part. Set"
            " CUDA_VISIBLE_DEVICES to the empty string before torch is imported"
        )
    jit = sys.modules.get("megatron.core.jit")
    if jit is not None and jit.jit_fuser is not _build_replacements()["torch:compile"]:
        raise EnvironmentUnfit(
            "backend cpu: megatron.core was imported before this backend replaced torch.compile and parts of"
            " torch.cuda. Prepare the backend first"
        )
    # Dynamo (every optimizer imports it) copies torch.cuda's classes at import: let it see the real ones.
    from torch import _dynamo  # noqa: F401

    _originals.update((target, getattr(*_find_owner(target))) for target in REPLACEMENT_REASON_BY_TORCH_NAME)
    for target, replacement in _build_replacements().items():
        setattr(*_find_owner(target), replacement)
    _MEGATRON_RNG_LOGGER.addFilter(_is_not_rng_warning)


def uninstall() -> None:
    """Put back every original object; do nothing if the facade is not installed.

    Raises EnvironmentUnfit, changing nothing, where other code has replaced one of our stand-ins meanwhile.
    """
    foreign = [
        t for t, ours in _build_replacements().items() if _originals and getattr(*_find_owner(t)) is not ours
    ]
    if foreign:
        raise EnvironmentUnfit(
            "backend cpu: its replacements in torch.cuda cannot be undone, because other code has replaced"
            " these attributes since. Undo those replacements first:",
            foreign,
        )
    for target, original in _originals.items():
        setattr(*_find_owner(target), original)
    _MEGATRON_RNG_LOGGER.removeFilter(_is_not_rng_warning)
    _originals.clear()


def hide_gpu_libraries() -> None:
    """Make imports of these libraries fail in this process as if they were not installed.

    Raises EnvironmentUnfit where one of them is there already.
    """
    imported = [name for name in _GPU_LIBRARIES if sys.modules.get(name) is not None]
    if imported:
        raise EnvironmentUnfit(
            f"backend cpu: {' and '.join(imported)} was imported already, and megatron would use it. Choose"
            " backend cpu before any library for GPUs is imported"
        )
    sys.modules.update(dict.fromkeys(_GPU_LIBRARIES))  # type: ignore[arg-type]
