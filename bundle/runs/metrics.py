"""The reports of a run: numbers, speed and traces for files, TensorBoard, the terminal and trackers.

A recipe may name Weights & Biases and MLflow (extras `wandb` and `mlflow`).
"""

import json
import math
import os
import resource
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, Self, TextIO

import numpy as np
import torch
from numpy.typing import NDArray

from bundle import capabilities, files
from bundle.errors import EnvironmentUnfit, format_bytes
from bundle.launch import events
from bundle.planning.size import compute_model_size, count_attention_pairs
from bundle.planning.tower import compute_tower_flop_coefficients
from bundle.recipe import Recipe, flatten
from bundle.runs.directory import RunDirectory

SPEED, _MEMORY, _SECONDS_LEFT = "train/tokens_per_second", "memory/peak_bytes", "train/seconds_left"
# Metrics that a line for people leaves out, or writes in another form at its end.
_NOT_IN_LINE = (
    SPEED,
    _MEMORY,
    _SECONDS_LEFT,
    "train/grad_norm",
    "train/learning_rate",
    "train/step_seconds",
    "train/samples",
    "train/tflops_per_device",
    "train/mfu",
    "train/straggler_ratio",
    "train/approx_kl",
    "reward/std",
    "reward/failed",
    "reward/unjudged",
    "reward/seconds",
    "completions/max_length",
    "completions/truncated",
    "groups/small",
    "groups/skipped_steps",
    "evaluation/mean_length",
    "evaluation/failed",
)
_NOT_IN_LINE_PREFIXES = (
    "train/clip_fraction/",
    "train/mismatch/",
    "train/ratio/",
    "train/correction/",
    "reward/failed/",
    "rollout/",
)
# The name of an event by the first part of its metrics; the default is "step".
_EVENT_NAMES_BY_PREFIX = {"validation": "evaluation", "evaluation": "evaluation", "data": "data"}


class Sink(Protocol):
    """Takes the numbers of one step. Keys are like `train/loss`; values are floats or ints."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def replace_nonfinite(value: Any) -> Any:
    """Return `value` with null in place of every number that is not finite, which JSON lacks."""
    if isinstance(value, dict):
        return {name: replace_nonfinite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [replace_nonfinite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class JsonLines:
    """Appends one JSON object per line; numbers that are not finite become null.

    Its methods raise JobFailed where the disk does not take the lines.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        noted = {"step": step, "time": round(time.time(), 3), **values}
        with files.convert_write_errors(Path(self._file.name)):
            self._file.write(json.dumps(replace_nonfinite(noted), allow_nan=False) + "\n")

    def sync(self) -> None:
        """Flush the lines to the disk: a file system that fails later does not lose them."""
        with files.convert_write_errors(Path(self._file.name)):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with files.convert_write_errors(Path(self._file.name)):  # of lines that it still has
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
        print(f"{at}  {_format_line(values)}", file=self._stream, flush=True)

    def close(self) -> None:
        self._stream.flush()


class LiveProgress:
    """A progress bar with the latest numbers under it; evaluations stay as lines above."""

    def __init__(self, steps: int, done: int, console: Any = None) -> None:
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._bar: Any = Progress(TextColumn("step"), MofNCompleteColumn(), BarColumn())
        self._task = self._bar.add_task("training", total=steps, completed=done)
        self._numbers = ""
        # Warnings go to stderr, which is the rank's log, not above the bar.
        self._live: Any = Live(get_renderable=self._view, console=console, redirect_stderr=False)
        self._live.start()

    def _view(self) -> Any:
        from rich.console import Group

        return Group(self._bar, self._numbers)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if any(name.startswith("validation/") for name in values):
            self._live.console.print(f"step {step}  {_format_line(values)}", highlight=False)
        else:
            self._bar.update(self._task, completed=step)
            self._numbers = _format_line(values).replace("train/", "")

    def close(self) -> None:
        self._live.stop()


class JsonEventSink:
    """Writes an event of `train --json` per report, with the keys of metrics.jsonl."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        kind = _EVENT_NAMES_BY_PREFIX.get(next(iter(values)).partition("/")[0], "step")
        events.print_event(kind, step=step, **replace_nonfinite(dict(values)))

    def close(self) -> None:
        sys.stdout.flush()


def build_terminal_sink(steps: int, done: int, stream: TextIO = sys.stdout) -> Sink:
    """Return the sink for the terminal.

    It writes events where the launcher waits for them, live progress on a terminal, and plain lines
    otherwise.
    """
    if events.has_listener():
        return JsonEventSink()
    return LiveProgress(steps, done) if stream.isatty() else PlainLines(steps, stream)


def _format_line(values: Mapping[str, float]) -> str:
    """Return the line for people: losses, tokens per second, peak memory and remaining time."""
    words = [
        f"{name} {_format_value(value)}"
        for name, value in values.items()
        if name not in _NOT_IN_LINE and not name.startswith(_NOT_IN_LINE_PREFIXES)
    ]
    if SPEED in values:
        words.append(f"tokens/s {values[SPEED]:,.0f}")
    if _MEMORY in values:
        words.append(f"memory {format_bytes(values[_MEMORY])}")
    if values.get(_SECONDS_LEFT):
        words.append(f"left {timedelta(seconds=round(values[_SECONDS_LEFT]))}")
    return "  ".join(words)


def _format_value(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def start_trackers(recipe: Recipe, directory: RunDirectory) -> list[Sink]:
    """Return a sink for each tracker of the recipe; a resumed run continues the tracker's run.

    Raise EnvironmentUnfit where a tracker is not installed or cannot be reached. A tracker that fails later
    is reported once and left out, as it must not end a training.
    """
    kinds: dict[str, Callable[[Recipe, RunDirectory, str | None], Any]] = {
        "wandb": WeightsAndBiasesSink,
        "mlflow": MLflowSink,
    }
    runs: dict[str, str] = json.loads(files.read_text_if_small(directory.trackers) or "{}")
    sinks: list[Sink] = []
    for name, kind in kinds.items():
        if getattr(recipe.metrics, name) is None:
            continue
        try:
            sink = kind(recipe, directory, runs.get(name))
        except ModuleNotFoundError as error:
            raise EnvironmentUnfit(
                f"metrics.{name}: {error.name} is not installed. Install it with pip install"
                f" 'mcore-bundle[{name}]', or leave metrics.{name} out of the recipe"
            ) from error
        except Exception as error:
            raise EnvironmentUnfit(
                f"metrics.{name}: cannot start: {type(error).__name__}: {error}"
            ) from error
        runs[name] = sink.run
        sinks.append(TolerantSink(name, sink))
    if runs:
        files.write_json(directory.trackers, runs)
    return sinks


class WeightsAndBiasesSink:
    """A run of Weights & Biases; with mode offline it lies in the run directory, for `wandb sync`."""

    def __init__(self, recipe: Recipe, directory: RunDirectory, run: str | None) -> None:
        import wandb

        settings = recipe.metrics.wandb
        assert settings is not None
        self.run = run or uuid.uuid4().hex[:8]
        self._run: Any = wandb.init(
            project=settings.project,
            entity=settings.entity,
            mode=settings.mode,
            id=self.run,
            resume="allow",
            name=directory.root.resolve().name,
            dir=directory.root,
            config=recipe.dump(),
            settings=wandb.Settings(console="off", silent=True),
        )
        # A resumed run reports steps again that an interrupted one had reported.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class MLflowSink:
    """A run of an MLflow server, or of a database in the run directory."""

    def __init__(self, recipe: Recipe, directory: RunDirectory, run: str | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        settings = recipe.metrics.mlflow
        assert settings is not None
        self._metric: Any = Metric
        self._client: Any = MlflowClient(
            settings.tracking_uri or f"sqlite:///{(directory.root / 'mlflow.db').resolve()}"
        )
        if run is not None:
            self.run = run
            return
        existing = self._client.get_experiment_by_name(settings.experiment)
        experiment = (
            existing.experiment_id if existing else self._client.create_experiment(settings.experiment)
        )
        created_run = self._client.create_run(experiment, run_name=directory.root.resolve().name)
        self.run = created_run.info.run_id
        parameters = [Param(key, json.dumps(value)[:500]) for key, value in flatten(recipe.dump())]
        for at in range(0, len(parameters), 100):  # as many as a request may hold
            self._client.log_batch(self.run, params=parameters[at : at + 100])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        numbers = {
            name: value for name, value in replace_nonfinite(dict(values)).items() if value is not None
        }
        metrics = [self._metric(name, value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self.run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self.run)


class TolerantSink:
    """A sink that may fail: the failure is reported once on standard error, and it gets no more reports."""

    def __init__(self, name: str, sink: Sink) -> None:
        self._name, self._sink = name, sink
        self._works = True

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._call_until_failure(lambda: self._sink.write(step, values))

    def close(self) -> None:
        self._call_until_failure(self._sink.close)

    def _call_until_failure(self, call: Callable[[], None]) -> None:
        if not self._works:
            return
        try:
            call()
        except Exception as error:  # noqa: BLE001  whatever a foreign service raises
            self._works = False
            text = f"metrics.{self._name}: no more metrics are sent in this run, because an attempt failed"
            print(f"{text} ({error or type(error).__name__})", file=sys.stderr, flush=True)


class MetricsDispatcher:
    """Sends every report to each sink, and closes them at the end of a `with`; most ranks have no sinks."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the `values` of `step` to all sinks."""
        for sink in self._sinks:
            sink.write(step, values)

    def sync(self) -> None:
        """Flush metrics.jsonl to the disk."""
        for sink in self._sinks:
            if isinstance(sink, JsonLines):
                sink.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for sink in self._sinks:
            sink.close()


class Speed:
    """Computes the speed of the average rank: all ranks share the work of all replicas."""

    def __init__(self, recipe: Recipe, backend: str, device: torch.device, *, dp: int) -> None:
        """Prepare the counts; `dp` is the number of replicas."""
        parallel = recipe.parallel
        self._size = compute_model_size(recipe.architecture, recipe.model)
        self._tower = compute_tower_flop_coefficients(recipe.architecture, recipe.model)
        self._ranks = parallel.tp * parallel.cp * parallel.pp * dp
        self._device = device
        self._peak: float | None = None  # FLOP/s in the dtype in use, where known
        if device.type != "cpu" and recipe.model.dtype == "bf16" and recipe.model.fp8 is None:
            peak = capabilities.find_capabilities(backend).find_bf16_peak(torch.cuda.get_device_name(device))
            self._peak = peak.bf16 if peak else None

    def compute_flops_per_rank(
        self, lengths: Sequence[int] | NDArray[np.int64], grids: NDArray[np.int64]
    ) -> float:
        """Return a rank's share of the model FLOPs of training on sequences of these lengths.

        The sequences are those of all replicas. `grids` [images, 3] are the patches of their images in time,
        height and width.
        """
        tokens = np.asarray(lengths, np.int64)
        pairs = int(count_attention_pairs(tokens).sum())
        windowed = int(count_attention_pairs(tokens, self._size.window).sum())
        image_flops = self._tower.count_training_flops(grids) if self._tower else 0
        return (self._size.count_step_flops(int(tokens.sum()), pairs, windowed) + image_flops) / self._ranks

    def compute_speed_and_memory(self, flops: float, seconds: float) -> Mapping[str, float]:
        """Return the speed of a device (TFLOP/s; MFU where the peak is known) and its peak memory [bytes].

        On the cpu the memory is the resident memory of this process.
        """
        gauges = {"train/tflops_per_device": flops / seconds / 1e12}
        if self._peak is not None:
            gauges["train/mfu"] = flops / seconds / self._peak
        if self._device.type != "cpu":
            gauges["memory/peak_bytes"] = torch.cuda.max_memory_allocated(self._device)
        else:
            gauges["memory/peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return gauges


class Profiler:
    """Writes one trace a rank, `profile/rank-R-steps-A-B.json.gz`, for chrome://tracing and Perfetto.

    A run that starts or ends within the profiled steps writes a trace of the steps that it made there. The
    profiler is a context manager, which writes that trace at the end.
    """

    def __init__(self, recipe: Recipe, directory: Path, rank: int) -> None:
        settings = recipe.profile
        self._first, self._last = (
            settings.steps if settings is not None and rank in settings.ranks else (1, 0)
        )
        self._directory, self._rank = directory, rank
        self._profile: Any = None
        self._trace_first = self._trace_last = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._profile is not None:
            self._end()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile a step within the context; `number` counts from 1."""
        if not self._first <= number <= self._last:
            yield
            return
        if self._profile is None:
            self._begin(number)
        with torch.profiler.record_function(f"step {number}"):
            yield
        self._trace_last = number
        if number == self._last:
            self._end()

    def _begin(self, number: int) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profile.start()
        self._trace_first = number

    def _end(self) -> None:
        self._profile.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        name = f"rank-{self._rank}-steps-{self._trace_first}-{self._trace_last}.json.gz"
        self._profile.export_chrome_trace(str(self._directory / name))
        self._profile = None
