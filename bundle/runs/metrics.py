"""Where a run's numbers go: metrics.jsonl, TensorBoard, and the terminal."""

import json
import math
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

_LEFT = "train/seconds_left"
_FOR_FILES = (_LEFT, "train/samples", "train/tflops_per_device", "memory/peak_bytes")


class Sink(Protocol):
    """Takes the numbers of one step. Keys are like `train/loss`; values are floats or ints."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def finite(value: Any) -> Any:
    """`value` with null in place of every number that is not finite, for which JSON has no words."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class JsonLines:
    """One JSON object per line, added to what is there; null for what is not finite."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        noted = {"step": step, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(finite(noted), allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars for TensorBoard; steps past `resume_at` are purged."""

    def __init__(self, directory: Path, resume_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=resume_at + 1 if resume_at else None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class PlainLines:
    """One readable line per report, for logs and pipes."""

    def __init__(self, steps: int, stream: TextIO = sys.stdout) -> None:
        self._steps, self._stream = steps, stream

    def write(self, step: int, values: Mapping[str, float]) -> None:
        at = f"step {step:>{len(str(self._steps))}}/{self._steps}"
        print(f"{at}  {_line(values)}", file=self._stream, flush=True)

    def close(self) -> None:
        self._stream.flush()


class LiveProgress:
    """A progress bar with the latest numbers under it; evaluations stay as lines above."""

    def __init__(self, steps: int, done: int, console: Any = None) -> None:
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar: Any = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("left")
        )
        self._task = self._bar.add_task("training", total=steps, completed=done)
        self._numbers = ""
        # Warnings belong into the rank's log, where stderr goes, not above the bar.
        self._live: Any = Live(get_renderable=self._view, console=console, redirect_stderr=False)
        self._live.start()

    def _view(self) -> Any:
        from rich.console import Group

        return Group(self._bar, self._numbers)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if any(name.startswith("validation/") for name in values):
            self._live.console.print(f"step {step}  {_line(values)}", highlight=False)
        else:
            self._bar.update(self._task, completed=step)
            self._numbers = _line(values).replace("train/", "")

    def close(self) -> None:
        self._live.stop()


def terminal(steps: int, done: int, stream: TextIO = sys.stdout) -> Sink:
    """Live progress on a terminal, plain lines otherwise."""
    return LiveProgress(steps, done) if stream.isatty() else PlainLines(steps, stream)


def _line(values: Mapping[str, float]) -> str:
    """What a person watches; samples, FLOP/s and memory are in the files."""
    words = [f"{name} {_short(value)}" for name, value in values.items() if name not in _FOR_FILES]
    left = [f"left {timedelta(seconds=round(values[_LEFT]))}"] if values.get(_LEFT) else []
    return "  ".join([*words, *left])


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


class Metrics:
    """Sends every report to each sink, and closes them at the end of a `with`; most ranks have no sinks."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Reports `values` of `step` everywhere."""
        for sink in self._sinks:
            sink.write(step, values)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sink in self._sinks:
            sink.close()
