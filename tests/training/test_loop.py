"""What the loop reports and when it stops; what an engine computes is tested with the engine."""

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bundle.data.samples import SampleSizes
from bundle.engine import Losses, StepResult
from bundle.errors import JobFailed, Preempted, UsageError
from bundle.recipe import Recipe, load
from bundle.runs import session
from bundle.runs.metrics import MetricsDispatcher
from bundle.runs.progress import Progress
from bundle.runs.session import Session
from bundle.training import loop
from bundle.training.loop import EarlyStopping

RATE = "train/tokens_per_second"
STEP, ASIDE = 0.02, 0.25  # seconds that a step takes, and evaluating or saving


class Clock:
    """Time that passes where it is said to."""

    now = 0.0

    @classmethod
    def passes(cls, seconds: float) -> None:
        cls.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "time", SimpleNamespace(perf_counter=lambda: Clock.now))
    monkeypatch.setattr(loop, "run_on_rank_0", lambda body: body())


@dataclass
class Slow:
    """An engine and its data: every step has 400 tokens, of which 100 are learned, and the losses and
    gradients that are given."""

    recipe: Recipe
    losses: list[float] = field(default_factory=list)
    gradient: float = 1.0
    tokens: int = 100
    validated: list[float] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    sizes: SampleSizes = field(
        default_factory=lambda: SampleSizes(np.array([250, 150]), np.zeros((0, 3), np.int64))
    )
    forward_timer: Any = field(
        default_factory=lambda: SimpleNamespace(take_seconds_if_supported=lambda: None)
    )

    def build_training_batches(self, _consumed: int) -> list[Any]:
        return []

    def build_validation_batches(self) -> dict[str, list[Any]]:
        return {"validation": [9.0], "validation/other": [7.0]}

    def forward_backward(self, _batches: list[Any]) -> None:
        self.calls.append("forward")
        Clock.passes(STEP)
        self.losses.append(2.0)

    def step_optimizer(self) -> StepResult:
        self.calls.append("optimizer")
        return StepResult(self.gradient, 1e-3, updated=True)

    def begin_loss_reduction(self) -> None:
        self.calls.append("losses")

    def take_losses(self) -> Losses:
        taken, self.losses = self.losses, []
        mean = sum(taken) / len(taken) if self.tokens else math.nan
        return Losses(mean, (), self.tokens * len(taken))

    def gather_pending_loss_sums(self) -> list[float]:
        return []

    def evaluate(self, batches: list[Any]) -> Losses:
        Clock.passes(ASIDE)
        if self.validated and batches == [9.0]:
            return Losses(self.validated.pop(0), (), 1)
        return Losses(batches[0], (), 1)


class Kept:
    """Keeps what is reported."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def write(self, step: int, values: Any) -> None:
        self.lines.append({"step": step, **values})

    def close(self) -> None:
        pass


def run(
    engine: Slow,
    progress: Progress,
    saved: list[int] | None = None,
    stops_at: int | None = None,
    exported: list[int] | None = None,
    early_stopping: EarlyStopping | None = None,
) -> list[dict[str, float]]:
    kept, either = Kept(), engine

    def save(state: Any) -> None:
        Clock.passes(ASIDE)
        if saved is not None:
            saved.append(state.step)

    made = Session(
        recipe=engine.recipe,
        engine=either,  # type: ignore[arg-type]
        directory=SimpleNamespace(),  # type: ignore[arg-type]
        checkpoints=SimpleNamespace(save=save, poll=lambda: None),  # type: ignore[arg-type]
        watchdog=SimpleNamespace(report_progress=lambda _: None, extend_patience=nullcontext),  # type: ignore[arg-type]
        metrics=MetricsDispatcher([kept]),
        speed=SimpleNamespace(  # type: ignore[arg-type]
            compute_flops_per_rank=lambda *_: 6e12,
            compute_speed_and_memory=lambda flops, seconds: {"flops": flops, "seconds": seconds},
        ),
        stragglers=SimpleNamespace(measure=lambda *_: {}),  # type: ignore[arg-type]
        profiler=SimpleNamespace(step=nullcontext),  # type: ignore[arg-type]
        stop_request=SimpleNamespace(  # type: ignore[arg-type]
            begin_exchange=lambda: engine.calls.append("stop"),
            agree_to_stop=lambda: progress.step == stops_at,
        ),
        progress=progress,
        identity={},
    )
    made.write_configured_export = lambda step=None: exported.append(step) if exported is not None else None  # type: ignore
    loop.train(made, either, early_stopping or EarlyStopping(engine.recipe.train.early_stop))  # type: ignore[arg-type]
    return kept.lines


def recipe(*overrides: str) -> Recipe:
    short = ("train.steps=6", "optimizer.warmup_steps=1", "train.log_interval=2", "train.eval_interval=1")
    return load("demo", [*short, "checkpoint.interval=1", *overrides])


def test_every_so_many_steps_are_exported_but_for_the_last_also_after_an_interruption_there():
    every = "checkpoint={interval: 2, export: hf, export_interval: 2}"
    engine, progress = Slow(recipe(every)), Progress()
    exported: list[int] = []
    with pytest.raises(Preempted):  # what stops a run leaves no time for an export
        run(engine, progress, stops_at=2, exported=exported)
    assert exported == []
    run(engine, progress, exported=exported)
    assert exported == [2, 4]
    longer = Slow(recipe("train.steps=7", every))
    run(longer, progress, exported=exported)
    assert exported == [2, 4, 6]
    run(Slow(recipe("checkpoint={interval: 2, export: hf}")), Progress(), exported=exported)
    assert exported == [2, 4, 6]


def test_rates_are_those_of_steps_whatever_is_evaluated_and_saved_between():
    progress = Progress()
    trained = [line for line in run(Slow(recipe()), progress) if "train/loss" in line]
    assert [line["step"] for line in trained] == [2, 4, 6]
    for line in trained:
        assert line["train/step_seconds"] == pytest.approx(STEP)
        assert line[RATE] == pytest.approx(400 / STEP)
        assert line["train/seconds_left"] == pytest.approx((6 - line["step"]) * STEP)
        assert line["train/samples"] == 16 * line["step"]
        assert line["flops"] == 12e12 and line["seconds"] == pytest.approx(2 * STEP)
    assert progress.losses == Losses(9.0, (), 1)


def test_every_evaluation_is_told_under_its_name():
    lines = run(Slow(recipe("train.eval_interval=3")), Progress())
    for name, loss in (("validation/loss", 9.0), ("validation/other/loss", 7.0)):
        assert [(line["step"], line[name]) for line in lines if name in line] == [(3, loss), (6, loss)]


def test_what_was_not_reported_before_an_interruption_counts_with_its_time():
    engine = Slow(recipe("train.steps=2"), losses=[2.0])
    (line,) = (line for line in run(engine, Progress(1, 16, 0, 1, 3.0, 5e12, 60)) if "train/loss" in line)
    assert line["train/step_seconds"] == pytest.approx((3.0 + STEP) / 2)
    assert line[RATE] == pytest.approx(460 / (3.0 + STEP))
    assert line["flops"] == 11e12 and line["seconds"] == pytest.approx(3.0 + STEP)


def test_a_loss_that_is_no_number_stops_the_run_although_gradients_are_zero(messages):
    progress = Progress()
    with pytest.raises(JobFailed, match="steps 1") as failed:
        run(Slow(recipe(), gradient=0.0, tokens=0), progress)
    messages(failed.value)
    lines = run(Slow(recipe("train.on_nan=skip"), tokens=0), Progress())
    assert lines[-1]["step"] == 6


STOPPING = ("train.steps=40", "train.early_stop={patience: 2, min_delta: 0.1}")


@pytest.mark.parametrize(
    ("validated", "ends"),
    [
        ([3.0, 2.0, 1.95, 1.92], 4),  # lower, but not by as much
        ([3.0, 3.0, 2.5, 2.0, 2.5, 2.5], 6),
        ([3.0, math.nan, 2.0, math.nan, math.nan], 5),
        ([math.nan, math.nan], 2),
        ([3.0, 2.95, 2.85, 2.8, 2.74, 2.7, 2.7], 7),  # what is too little adds up
    ],
)
@pytest.mark.parametrize("resumed_at", [None, 2, 3])
def test_a_run_ends_when_the_validation_loss_falls_no_more(validated, ends, resumed_at):
    saved: list[int] = []
    progress, asked = Progress(), recipe(*STOPPING)
    state = EarlyStopping(asked.train.early_stop)
    if resumed_at is not None:  # a checkpoint, told to stop there
        rest, validated = validated[resumed_at:], validated[:resumed_at]
        short = Slow(recipe(f"train.steps={resumed_at}", STOPPING[1]), validated=validated)
        run(short, progress, early_stopping=state)
        progress, validated = Progress.from_dump(progress.dump()), rest
        state = EarlyStopping(state.rule, state.lowest, state.unimproved)
    ended = progress.step == ends
    assert ended == (state.reason is not None)
    run(Slow(asked, validated=list(validated)), progress, saved, early_stopping=state)
    assert progress.step == ends and saved[-1:] == ([] if ended else [ends])
    assert state.reason is not None and state.unimproved == 2
    run(Slow(asked), progress, saved := [], early_stopping=state)  # killed before it could write its result
    assert progress.step == ends and not saved


def test_the_same_loss_again_is_not_below_itself():
    progress, asked = Progress(), recipe("train.steps=40", "train.early_stop={patience: 2}")
    state = EarlyStopping(asked.train.early_stop)
    run(Slow(asked, validated=[3.0, 3.0, 3.0, 1.0]), progress, early_stopping=state)
    assert (progress.step, state.lowest, state.unimproved) == (3, 3.0, 2)


def test_the_step_of_an_early_stop_is_the_last_it_is_saved_and_a_request_to_stop_there_is_none():
    saved: list[int] = []
    progress = Progress()
    engine = Slow(recipe(*STOPPING, "checkpoint.interval=0"), validated=[3.0, 3.0, 3.0])
    run(engine, progress, saved, stops_at=3)
    assert progress.step == 3 and saved == [3]
    with pytest.raises(Preempted, match="step 2"):
        run(Slow(engine.recipe, validated=[3.0, 3.0]), Progress(), stops_at=2)


def test_rank_0_decides_for_all_whether_the_loss_falls(monkeypatch):
    progress, engine = Progress(), Slow(recipe(*STOPPING), validated=[3.0, 2.0, 1.0, 0.5])
    monkeypatch.setattr(loop, "run_on_rank_0", lambda _: 5.0)
    state = EarlyStopping(engine.recipe.train.early_stop)
    run(engine, progress, early_stopping=state)
    assert progress.step == 3 and state.lowest == 5.0


def test_an_early_stop_without_held_out_data_is_said(messages):
    engine = Slow(recipe(*STOPPING))
    engine.build_validation_batches = dict  # type: ignore[method-assign, assignment]
    with pytest.raises(UsageError) as refused:
        run(engine, Progress())
    messages(refused.value)
    assert "train.early_stop" in str(refused.value)


def test_skipped_updates_are_reported():
    progress = Progress()
    lines = run(Slow(recipe("train.on_nan=skip"), gradient=math.inf), progress)
    assert [line["train/skipped_updates"] for line in lines if "train/loss" in line] == [2, 4, 6]
    assert progress.skipped_updates == 6


def test_what_the_host_reads_is_exchanged_before_weights_are_updated():
    """The losses in reported steps alone; stop requests in every step, and again after an evaluation."""
    engine = Slow(recipe("train.steps=3", "train.eval_interval=3"))
    run(engine, Progress())
    plain, reported = ["forward", "stop", "optimizer"], ["forward", "stop", "losses", "optimizer"]
    assert engine.calls == [*plain, *reported, *reported, "stop"]
