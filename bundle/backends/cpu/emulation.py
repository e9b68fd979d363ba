"""What "cuda" means on a cpu: one device, one order of work, one random generator.

Stand-ins for attributes of torch.cuda, and the function mode that rewrites device arguments inside the
context in which megatron is called. `facade` puts them in place.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

CPU = torch.device("cpu")


class Stream:
    """A stream of a device that does everything in program order; also the context of `torch.cuda.stream`."""

    device = CPU

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def wait_stream(self, stream: "Stream") -> None: ...

    def wait_event(self, event: "Event") -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event


class Event:
    """A point in time, in the order in which this process works."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._seconds = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds from this event to `end`."""
        return (end._seconds - self._seconds) * 1e3


class DeviceContext(nullcontext):
    """`torch.cuda.device(index)`: there is one device, so entering it changes nothing."""


class Generators:
    """`torch.cuda.default_generators`: the cpu's under every index (megatron indexes with a device)."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[torch.Generator]:
        return iter((torch.default_generator,))


_STREAM = Stream()


def current_device() -> torch.device:
    return CPU


def synchronize(device: Any = None) -> None: ...


def current_stream(device: Any = None) -> Stream:
    return _STREAM


def stream(stream: Stream | None) -> AbstractContextManager[Stream | None]:
    return nullcontext(stream)


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    torch.default_generator.set_state(new_state)


def lazy_call(callback: Callable[[], Any], **options: Any) -> None:
    callback()


def lazy_init() -> None: ...


def _is_cuda_device(value: Any) -> bool:
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
            if _is_cuda_device(kwargs.get("device")):
                kwargs = {**kwargs, "device": CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        replacement = _TENSOR_AND_DEVICE_REPLACEMENTS.get(func)
        if replacement is not None:
            return replacement(*args, **(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)


def _return_tensor(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


def _do_nothing(*args: Any, **kwargs: Any) -> None: ...


def _convert_to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor.to(*(CPU if _is_cuda_device(a) else a for a in args), **kwargs)


def _get_or_cast_cuda_type(tensor: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
    # The optimizers compare type() with "torch.cuda.FloatTensor" and refuse any other name.
    if dtype is None:
        return tensor.type().replace("torch.", "torch.cuda.", 1)
    return tensor.type(dtype.replace("torch.cuda.", "torch.") if isinstance(dtype, str) else dtype, **kwargs)


def _make_device(*args: Any, **kwargs: Any) -> torch.device:
    named = args[0] if args else kwargs.get("type")
    return CPU if _is_cuda_device(named) else torch.device(*args, **kwargs)


_TENSOR_AND_DEVICE_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.cuda: _return_tensor,
    torch.Tensor.pin_memory: _return_tensor,
    torch.Tensor.record_stream: _do_nothing,
    torch.Tensor.to: _convert_to,
    torch.Tensor.type: _get_or_cast_cuda_type,
    torch.device: _make_device,
}
_TORCH_FUNCTION_MODE = _CudaMeansCpu()
_thread = threading.local()


def _is_mode_on() -> bool:
    return _TORCH_FUNCTION_MODE in _get_current_function_mode_stack()


def has_entered_megatron_calls() -> bool:
    """True inside `megatron_calls` (in this thread)."""
    return getattr(_thread, "inside", False)


@contextmanager
def megatron_calls() -> Iterator[None]:
    """Run the block with "cuda" meaning the cpu, for calls into megatron; also a decorator.

    All code that executes megatron must run inside: building process groups, models, DDP and optimizers,
    seeding, forward, backward (the context stays on for hooks and recomputation), schedules, the optimizer
    step, saving and loading checkpoints. Outside, torch is unchanged. Contexts nest: only the outermost entry
    has an effect. A torch call inside costs about two microseconds more. The context belongs to the thread: a
    new thread that calls megatron must enter it too; autograd's threads inherit it.
    """
    if has_entered_megatron_calls():
        yield
        return
    _thread.inside = True
    try:
        with _TORCH_FUNCTION_MODE:
            yield
    finally:
        _thread.inside = False


def wrap_autograd_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return autograd's entry into its engine, with the mode on if this is a call of megatron.

    A mode is off inside its own handler, and `backward` arrives here through the handler. Gradient hooks,
    custom backward functions and recomputation are megatron's code too and need the mode.
    """

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _TORCH_FUNCTION_MODE if has_entered_megatron_calls() and not _is_mode_on() else nullcontext():
            return original(*args, **kwargs)

    return run
