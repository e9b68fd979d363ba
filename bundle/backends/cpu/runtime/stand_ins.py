"""What the facade puts in place of torch.cuda's attributes: one device, one order of work, one generator."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

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
        """Milliseconds from this event to `end`."""
        return (end._seconds - self._seconds) * 1e3


class Device(nullcontext):
    """`torch.cuda.device(index)`: there is one device, so entering it changes nothing."""


class Generators:
    """`torch.cuda.default_generators`: the cpu's under every index (megatron indexes with a device)."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[torch.Generator]:
        return iter((torch.default_generator,))


_ORDER = Stream()


def current_device() -> torch.device:
    return CPU


def synchronize(device: Any = None) -> None: ...


def current_stream(device: Any = None) -> Stream:
    return _ORDER


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
