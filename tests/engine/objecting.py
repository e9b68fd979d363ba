"""What an engine does with objectives, their measures, divisors, and ranks that have nothing to train on."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bundle.engine import Engine, MicroBatch, Scores
from bundle.verification.numbers import Bench, Numbers, find_worst, measure_gap
from tests.engine.experiments import EVEN, MODELS, engine, gradients, micro_batches, recipe
from tests.engine.reference import texts


class Measuring:
    """The loss of advantages, measured by both reductions; `order` is that of the measures."""

    def __init__(self, *order: str) -> None:
        kinds: Any = {"chance": "mean", "surprise": "maximum"}
        self.measures = MappingProxyType({name: kinds[name] for name in order or kinds})

    def __call__(self, micro_batch: MicroBatch, scores: Scores) -> Tensor:
        loss = -micro_batch.extra_tensors["advantages"] * scores.log_probs
        measured = {"chance": scores.log_probs.exp(), "surprise": -scores.log_probs}
        return torch.stack([loss, *(measured[name].detach() for name in self.measures)])


def _job(layers: int = 0, model: str = "dense") -> Any:
    return recipe(MODELS[model], {}, packed=False, layers=layers)


def _measured(of: Engine, batches: list[MicroBatch]) -> dict[str, float]:
    """The measures of this rank's micro-batches by `compute_log_probs`, over both ranks."""
    parts = [
        scores.log_probs[one.join_gathered_shards(one.loss_mask) > 0]
        for one, scores in zip(batches, of.compute_log_probs(batches), strict=True)
    ]
    mine = torch.cat(parts).double()
    sums = torch.tensor([mine.exp().sum().item(), len(mine)], dtype=torch.float64)
    top = (-mine).max()
    dist.all_reduce(sums)
    dist.all_reduce(top, dist.ReduceOp.MAX)
    return {"chance": float(sums[0] / sums[1]), "surprise": float(top)}


def _far(seen: Any, wanted: dict[str, float]) -> float:
    assert seen.keys() == wanted.keys(), seen
    return find_worst([abs(seen[name] - value) for name, value in wanted.items()])


def _untempered(batches: list[MicroBatch]) -> list[MicroBatch]:
    return [replace(one, temperature=None) for one in batches]


def _copies(of: Engine) -> Numbers:
    return {name: gradient.clone() for name, (gradient, _) in gradients(of).items()}


def per_call(bench: Bench) -> float:
    """How far measures of an objective given to a call are; later calls have none, or those of another."""
    gaps = []
    with engine(bench, _job()) as made:
        batches = micro_batches(made, texts(EVEN), "rows", "token")
        wanted = _measured(made, batches)
        plain = made.evaluate(_untempered(batches)).main
        for order in (("chance", "surprise"), ("surprise", "chance"), ("surprise",)):
            made.forward_backward(batches, Measuring(*order))
            gaps.append(_far(made.take_losses().measures, {name: wanted[name] for name in order}))
            made.forward_backward(batches)
            again = made.take_losses()
            assert not again.measures, again
            assert abs(again.main - plain) < 1e-5 and not math.isnan(made.evaluate(batches).main)
        # Both kinds of call since the last report: the measures are of the tokens that were measured.
        made.forward_backward(batches, Measuring())
        made.forward_backward(batches)
        gaps.append(_far(made.take_losses().measures, wanted))
    return find_worst(gaps)


def divided(bench: Bench) -> float:
    """How far a constant divisor is from a mean over tokens times tokens / divisor; MTP stays a mean."""
    objective = Measuring()
    with engine(bench, _job(layers=1)) as made:
        batches = micro_batches(made, texts(EVEN), "rows", "token")

        def run(function: Any, divisor: float | None) -> tuple[Numbers, Any]:
            made.forward_backward(batches, function, divisor=divisor)
            return _copies(made), made.take_losses()

        both, mean = run(objective, None)
        none, _ = run(lambda one, scores: scores.log_probs * 0, None)  # MTP alone
        seen, losses = run(objective, 50.0)
        share = mean.tokens / 50.0
        wanted = {name: (both[name] - none[name]) * share + none[name] for name in both}
        for wrong in (0.0, -1.0, math.nan, math.inf):
            with pytest.raises(ValueError, match=r"^divisor"):
                made.forward_backward(batches, divisor=wrong)
        with pytest.raises(ValueError, match=r"^divisor"):
            made.forward_backward(micro_batches(made, texts(EVEN), "rows", "sequence"), divisor=5.0)
        assert losses.main == mean.main and losses.mtp == mean.mtp
        return measure_gap(seen, wanted)


def masked(bench: Bench) -> float:
    """How far the gradient moves when values in masked places are not finite: not at all."""
    with engine(bench, _job()) as made:
        found = []
        for garbage in (0.0, math.nan, math.inf, -math.inf):
            sequences = [
                replace(one, advantages=one.advantages.where(one.mask > 0, garbage)) for one in texts(EVEN)
            ]
            batches = micro_batches(made, sequences, "rows", "token")
            made.forward_backward(batches, _exponential)
            assert math.isfinite(made.take_losses().main)
            found.append(_copies(made))
        assert all(torch.isfinite(one).all() for one in found[-1].values())
        return 0.0 if all(torch.equal(found[0][n], x) for one in found for n, x in one.items()) else math.inf


def _exponential(micro_batch: MicroBatch, scores: Scores) -> Tensor:
    """An objective that answers a masked place with what is no number."""
    result = (scores.log_probs - micro_batch.extra_tensors["advantages"]).exp()
    return result.where(micro_batch.loss_mask > 0, math.nan)


def empty(bench: Bench) -> float:
    """How far gradients and losses are where one rank has all micro-batches: those of shared ones.

    With sequence means, and where routers are balanced over the tokens of a step, too.
    """
    gaps = []
    for model, mean in (("dense", "token"), ("dense", "sequence"), ("balanced", "token")):
        found = []
        for is_shared in (True, False):  # engines of their own: a run moves the biases that steer routers
            with engine(bench, _job(1, model)) as made:
                batches = _deal(made, mean, is_shared=is_shared)
                found.append(_train(made, batches, mean))
                assert len(made.compute_log_probs(batches)) == len(batches)
                main = torch.tensor(made.evaluate(batches).main).double()
                found[-1] |= {"evaluated": main}
        gaps.append(measure_gap(*reversed(found)))
    return find_worst(gaps)


def _deal(of: Engine, mean: str, *, is_shared: bool) -> list[MicroBatch]:
    """The micro-batches of this rank; where they are not shared, the first rank has all."""
    groups = of.groups
    if not is_shared:
        of.groups = replace(groups, dp=replace(groups.dp, size=1))
    batches = micro_batches(of, texts(EVEN), "rows", mean)
    of.groups = groups
    return batches if is_shared or groups.dp.rank == 0 else []


def _train(of: Engine, batches: list[MicroBatch], mean: Any) -> Numbers:
    """Losses, measures, gradients and steering biases."""
    of.forward_backward(batches, Measuring(), mean=mean)
    losses = of.take_losses()
    named = {"loss": losses.main, "mtp": losses.mtp[0], "tokens": float(losses.tokens), **losses.measures}
    biases = {name: x.clone() for name, x in of.models[0].named_buffers() if name.endswith("expert_bias")}
    return _copies(of) | biases | {name: torch.tensor(value).double() for name, value in named.items()}


def nothing(bench: Bench) -> float:
    """Infinite if a step without a micro-batch on any rank has a gradient, or a loss or measure."""
    with engine(bench, _job(1), lambda _: Measuring()) as made:
        made.forward_backward([], divisor=8.0)
        assert all(not gradient.any() for gradient in _copies(made).values())
        losses = made.take_losses()
        assert made.compute_log_probs([]) == []
        numbers = (losses.main, made.evaluate([]).main)
        return 0.0 if all(map(math.isnan, numbers)) and not losses.measures else math.inf


def restored(bench: Bench) -> float:
    """How far losses and measures are that were saved and taken up again between two calls."""
    with engine(bench, _job(1), lambda _: Measuring()) as made:
        first, second = (micro_batches(made, texts(EVEN)[i : i + 2] * 2, "rows", "token") for i in (0, 2))

        def train(halves: Callable[[], None]) -> Numbers:
            made.forward_backward(first)
            halves()
            made.forward_backward(second)
            losses = made.take_losses()
            values = {"main": losses.main, "mtp": losses.mtp[0], **losses.measures}
            return {name: torch.tensor(value).double() for name, value in values.items()}

        def go_on() -> None:
            numbers = json.loads(json.dumps(made.gather_pending_loss_sums(), allow_nan=True))
            made.take_losses()
            made.restore_loss_sums(numbers)

        wanted, seen = train(lambda: None), train(go_on)
        # An empty state comes back as one, and the next maximum is that of what follows.
        numbers = made.gather_pending_loss_sums()
        assert not any(map(math.isinf, numbers))
        made.restore_loss_sums(numbers)
        made.forward_backward(second)
        after = made.take_losses().measures
        gaps = [measure_gap(seen, wanted), _far(after, _measured(made, second))]
        # A mean that is no number stays one.
        made.forward_backward([replace(one, labels=one.labels * 0 + 10**6) for one in first])
        go_on()
        assert all(map(math.isnan, made.take_losses().measures.values()))

        # What a call's own objective measured is not in a checkpoint, whose engine would not know it.
        size = len(made.gather_pending_loss_sums())
        made.forward_backward(first, Measuring("surprise"))
        assert len(made.gather_pending_loss_sums()) == size
        made.take_losses()
    with engine(bench, _job(1)) as made:
        made.forward_backward(micro_batches(made, texts(EVEN), "rows", "token"), Measuring())
        numbers = made.gather_pending_loss_sums()
        assert len(numbers) == size - 3
        main = made.take_losses().main
        made.restore_loss_sums(numbers)
        gaps.append(abs(made.take_losses().main - main))
    return find_worst(gaps)
