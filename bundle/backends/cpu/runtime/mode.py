"""The function mode that makes "cuda" mean the cpu, and the context in which megatron is called."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from bundle.backends.cpu.runtime.stand_ins import CPU


def _means_device(value: Any) -> bool:
    """True for what names a CUDA device: "cuda", "cuda:1", torch.device("cuda"), or an index."""
    if isinstance(value, str):
        return value.startswith("cuda")
    if isinstance(value, torch.device):
        return bool(value.type == "cuda")
    return type(value) is int  # an index; a bool or an enum is none


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites device arguments; megatron has 35 to 70 literals `device="cuda"`, more in every release."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs:
            if _means_device(kwargs.get("device")):
                kwargs = {**kwargs, "device": CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        special = _SPECIAL.get(func)
        if special is not None:
            return special(*args, **(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)


def _same_tensor(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor.to(*(CPU if _means_device(a) else a for a in args), **kwargs)


def _type(tensor: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
    # The optimizers compare type() with "torch.cuda.FloatTensor" and refuse any other name.
    if dtype is None:
        return tensor.type().replace("torch.", "torch.cuda.", 1)
    return tensor.type(dtype.replace("torch.cuda.", "torch.") if isinstance(dtype, str) else dtype, **kwargs)


def _device(*args: Any, **kwargs: Any) -> torch.device:
    named = args[0] if args else kwargs.get("type")
    return CPU if _means_device(named) else torch.device(*args, **kwargs)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.Tensor.cuda: _same_tensor,
    torch.Tensor.pin_memory: _same_tensor,
    torch.Tensor.record_stream: _nothing,
    torch.Tensor.to: _to,
    torch.Tensor.type: _type,
    torch.device: _device,
}
_MODE = _CudaMeansCpu()
_thread = threading.local()


def _on() -> bool:
    return _MODE in _get_current_function_mode_stack()


def active() -> bool:
    """True inside `megatron_calls` (in this thread)."""
    return getattr(_thread, "inside", False)


@contextmanager
def megatron_calls() -> Iterator[None]:
    """The context in which "cuda" means the cpu, for calls into megatron; also a decorator.

    Inside must run whatever executes megatron's code: building process groups, models, DDP and optimizers,
    seeding, forward, backward (the context stays on for hooks and recomputation),
    schedules, the optimizer step, saving and loading checkpoints. Outside, torch is the torch it was.
    Nests freely (only the outermost entry does anything); costs about two microseconds per torch call inside.
    It belongs to the thread: a thread of one's own that calls megatron enters it itself; autograd's threads
    take it along.
    """
    if active():
        yield
        return
    _thread.inside = True
    try:
        with _MODE:
            yield
    finally:
        _thread.inside = False


def kept_in_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Autograd's way into its engine, with the mode on if this is a call of megatron.

    A mode is off inside its own handler, and `backward` arrives here through the handler, but gradient hooks,
    custom backward functions and recomputation are megatron's code too.
    """

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _MODE if active() and not _on() else nullcontext():
            return original(*args, **kwargs)

    return run
