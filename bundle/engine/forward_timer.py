"""How long this rank's own part of forward passes takes, without what it waits for the others."""

import time
from typing import Any

import torch


class ForwardTimer:
    """Times forward passes of training, as a context manager around each.

    Read by `take_seconds_if_supported` every now and then.

    A pass through a stage exchanges nothing with other stages and data-parallel replicas, so that a slow
    device shows there, and not in those that wait for it; tensor- and expert-parallel ranks are as slow as
    the slowest of them. On GPUs it is told by events in the stream, for which the host does not wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_supported = device.type in ("cpu", "cuda")
        self._seconds = 0.0
        self._passes: list[tuple[Any, Any]] = []
        self._start: Any = None

    def __enter__(self) -> None:
        self._start = self._read_clock() if self._is_supported and torch.is_grad_enabled() else None

    def __exit__(self, *_: object) -> None:
        if self._start is None:
            return
        if self._device.type == "cuda":
            self._passes.append((self._start, self._read_clock()))
        else:
            self._seconds += self._read_clock() - self._start

    def take_seconds_if_supported(self) -> float | None:
        """Return the seconds since the last call; None where they are unknown.

        Waits for the device to finish.
        """
        if not self._is_supported:
            return None
        for begun, ended in self._passes:
            ended.synchronize()
            self._seconds += begun.elapsed_time(ended) / 1000
        seconds, self._seconds, self._passes = self._seconds, 0.0, []
        return seconds

    def _read_clock(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
