"""Traces of the steps that a recipe names, by torch's profiler."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch

from bundle.recipe import Recipe


class Profiler:
    """Writes one trace a rank, `profile/rank-R-steps-A-B.json.gz`, which chrome://tracing and Perfetto open.

    Where a run goes on or ends inside the stretch, the trace has the steps that it made there: a context
    manager, which writes it at the end.
    """

    def __init__(self, recipe: Recipe, directory: Path, rank: int) -> None:
        asked = recipe.profile
        self._first, self._last = asked.steps if asked is not None and rank in asked.ranks else (1, 0)
        self._directory, self._rank = directory, rank
        self._running: Any = None
        self._begun = self._done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._running is not None:
            self._end()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step, counted from 1."""
        if not self._first <= number <= self._last:
            yield
            return
        if self._running is None:
            self._begin(number)
        with torch.profiler.record_function(f"step {number}"):
            yield
        self._done = number
        if number == self._last:
            self._end()

    def _begin(self, number: int) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._running = torch.profiler.profile(activities=activities, record_shapes=True)
        self._running.start()
        self._begun = number

    def _end(self) -> None:
        self._running.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        name = f"rank-{self._rank}-steps-{self._begun}-{self._done}.json.gz"
        self._running.export_chrome_trace(str(self._directory / name))
        self._running = None
