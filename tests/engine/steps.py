"""What becomes of a step: clipping, updates left out, losses kept apart, nothing learned, models in turn."""

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from bundle.engine.scores import score_labels
from bundle.errors import JobFailed
from bundle.recipe import Recipe, from_mapping
from bundle.verification.numbers import DENSE_HF_CONFIG, Bench, find_worst
from tests.engine.experiments import EVEN, MODELS, engine, gradients, micro_batches, recipe
from tests.engine.reference import texts

LIMIT = 0.01


def _job(on_nan: str = "stop", **model: Any) -> Recipe:
    return from_mapping(
        {
            "name": "steps",
            "model": {"config": DENSE_HF_CONFIG, "dtype": "fp32", **model},
            "data": {"source": "text", "path": ["none"], "tokenizer": "hf:none", "sequence_length": 24},
            "train": {"steps": 9, "global_batch_size": 8, "on_nan": on_nan},
            "optimizer": {"lr": 1e-2, "warmup_steps": 3, "clip_grad": LIMIT, "weight_decay": 0.0, "eps": 1.0},
        },
    )


def clipped(bench: Bench) -> float:
    """How far the first step of Adam is from its formula with the clipped gradient (an eps of 1 shows it)."""
    with engine(bench, _job()) as made:
        before = {name: p.detach().clone() for name, p in made.models[0].named_parameters()}
        made.forward_backward(micro_batches(made, texts(EVEN), "rows", "token"))
        whole = {name: gradient.clone() for name, (gradient, _) in gradients(made).items()}
        result = made.step_optimizer()
        assert result.grad_norm > 10 * LIMIT, result
        share, gaps = LIMIT / (result.grad_norm + 1e-6), []
        for name, parameter in made.models[0].named_parameters():
            gradient = whole[name] * share
            wanted = -result.learning_rate * gradient / (gradient.abs() + 1.0)
            # In double: the step is small beside the weight that it is added to.
            seen = parameter.detach().double() - before[name].double()
            gaps.append((seen - wanted).abs().max() / LIMIT)
        return find_worst(gaps)


def left_out(bench: Bench) -> float:
    """Infinite if an update whose gradient is not finite on one rank changes anything, or says nothing.

    Or if gradients are made ready for an update more than once.
    """
    prepare = DistributedOptimizer.prepare_grads
    counted = mock.patch.object(DistributedOptimizer, "prepare_grads", autospec=True, side_effect=prepare)
    with counted as ready, engine(bench, _job("skip")) as made:
        optimizers = len(getattr(made.optimizer, "chained_optimizers", [made.optimizer]))
        batches = micro_batches(made, texts(EVEN), "rows", "token")
        before = [p.detach().clone() for p in made.models[0].parameters()]
        poison = math.nan if dist.get_rank() == 1 else 1.0
        made.forward_backward(batches, lambda _, scores: scores.log_probs * poison)
        result, rate = made.step_optimizer(), made.optimizer.param_groups[0]["lr"]
        still = all(torch.equal(a, b) for a, b in zip(before, made.models[0].parameters(), strict=True))
        told = not math.isfinite(result.grad_norm) and not result.updated and rate == result.learning_rate
        made.forward_backward(batches)
        goes_on = made.step_optimizer().updated and ready.call_count == 2 * optimizers
        return 0.0 if still and told and goes_on else math.inf


def refused(bench: Bench) -> float:
    """Infinite if a step whose gradient is not finite on one rank goes through on any of them."""
    with engine(bench, _job()) as made:
        batches = micro_batches(made, texts(EVEN), "rows", "token")
        made.forward_backward(batches)
        made.step_optimizer()
        poison = math.nan if dist.get_rank() == 1 else 1.0
        made.forward_backward(batches, lambda _, scores: scores.log_probs * poison)
        try:
            made.step_optimizer()
        except JobFailed as error:
            return 0.0 if "step 2 " in str(error) else math.inf
        return math.inf


def compared(bench: Bench) -> float:
    """How far a reference for all weights is from the model that it was kept of; infinite without one.

    Or if the weights are not what they were after it was asked.
    """
    with engine(bench, _job()) as made:
        batches = micro_batches(made, texts(EVEN), "rows", "token")
        try:
            made.compute_reference_log_probs(batches)
        except ValueError:
            made.keep_reference()
        else:
            return math.inf
        wanted = [scores.log_probs for scores in made.compute_log_probs(batches)]
        for _ in range(2):
            made.forward_backward(batches)
            made.step_optimizer()
        before = [p.detach().clone() for p in made.models[0].parameters()]
        moved = [scores.log_probs for scores in made.compute_log_probs(batches)]
        seen = made.compute_reference_log_probs(batches)
        same = all(torch.equal(a, b) for a, b in zip(before, made.models[0].parameters(), strict=True))
        away = max(float((a - b).abs().max()) for a, b in zip(wanted, moved, strict=True))
        gap = max(float((a - b).abs().max()) for a, b in zip(wanted, seen, strict=True))
        made.forward_backward(batches)  # and it trains on as if nobody had asked
        goes_on = made.step_optimizer().updated
        return gap if same and away > 1e-3 and goes_on else math.inf


def apart(bench: Bench) -> float:
    """How far a step and an evaluation inside it are from the losses that each has alone."""
    with engine(bench, _job()) as made:
        ours, others = (micro_batches(made, texts(EVEN)[i : i + 2] * 2, "rows", "token") for i in (0, 2))
        alone = made.evaluate(others).main
        made.forward_backward(ours)
        wanted = made.take_losses().main
        made.forward_backward(ours)
        between = made.evaluate(others).main
        assert abs(alone - wanted) > 1e-3
        return find_worst([abs(between - alone), abs(made.take_losses().main - wanted)])


def exchanged_early(bench: Bench) -> float:
    """How far losses that were exchanged before they are taken are from those that were not.

    Whatever comes between: nothing, an evaluation, which has losses of its own, or another forward pass.
    """
    with engine(bench, _job()) as made:
        ours, others = (micro_batches(made, texts(EVEN)[i : i + 2] * 2, "rows", "token") for i in (0, 2))
        alone = made.evaluate(others)
        made.forward_backward(ours)
        wanted = made.take_losses()
        assert abs(alone.main - wanted.main) > 1e-3
        made.forward_backward(ours)
        made.begin_loss_reduction()
        gaps = [abs(made.take_losses().main - wanted.main)]
        assert made.take_losses().tokens == 0
        made.forward_backward(ours)
        made.begin_loss_reduction()
        gaps += [abs(made.evaluate(others).main - alone.main), abs(made.take_losses().main - wanted.main)]
        made.forward_backward(ours)
        made.begin_loss_reduction()
        made.forward_backward(others)
        both = made.take_losses()
        total = wanted.main * wanted.tokens + alone.main * alone.tokens
        return find_worst([*gaps, abs(both.main - total / both.tokens)])


def unlearned(bench: Bench) -> float:
    """Infinite if a step without a learned token anywhere has a gradient, or a loss that is a number.

    Of experts that are balanced neither, whatever the mean is over. It counts as an update: what the
    optimizer does without a gradient, weight decay above all, is done.
    """
    jobs = (_job(), recipe(MODELS["balanced"], {}, packed=False))
    return max(_unlearned(bench, job, mean) for job in jobs for mean in ("token", "sequence"))


def _unlearned(bench: Bench, job: Recipe, mean: str) -> float:
    values = job.dump()
    values["optimizer"]["weight_decay"] = 0.0
    with engine(bench, from_mapping(values)) as made:
        silent = [replace(text, mask=torch.zeros_like(text.mask)) for text in texts(EVEN)]
        nothing, something = (micro_batches(made, each, "rows", mean) for each in (silent, texts(EVEN)))
        before = [p.detach().clone() for p in made.models[0].parameters()]
        made.forward_backward(nothing)
        result, losses = made.step_optimizer(), made.take_losses()
        still = all(torch.equal(a, b) for a, b in zip(before, made.models[0].parameters(), strict=True))
        told = result.updated and result.grad_norm == 0 and losses.tokens == 0 and math.isnan(losses.main)
        made.forward_backward(something)
        goes_on = made.step_optimizer().grad_norm > 0 and math.isfinite(made.take_losses().main)
        return 0.0 if still and told and goes_on else math.inf


def prediction_in_turn(bench: Bench) -> float:
    """How far a model that predicts two tokens is from one before it that predicts one, in what both have."""
    found = []
    for depths in (1, 2):
        with engine(bench, _job(mtp={"layers": depths})) as made:
            made.forward_backward(micro_batches(made, texts(EVEN), "rows", "token"))
            losses = made.take_losses()
            found.append((losses.main, *losses.mtp))
    one, two = found
    return find_worst([*(abs(a - b) for a, b in zip(one, two[:2], strict=True)), 0 * two[2]])


def shared_head(bench: Bench) -> float:
    """Scores and gradients over a vocabulary of two ranks, one of which has all the large logits."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(6, 2, 20, generator=generator).double()
    whole[..., 10:] += 900.0
    labels = torch.randint(20, (2, 6), generator=generator)
    plain = whole.clone().requires_grad_()
    log_p = plain.transpose(0, 1).log_softmax(-1)
    picked, entropy = log_p.gather(-1, labels[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)
    (picked + 0.3 * entropy).sum().backward()

    mine = slice(10 * dist.get_rank(), 10 * dist.get_rank() + 10)
    part = whole[..., mine].clone().requires_grad_()
    seen = score_labels(part, labels, dist.group.WORLD)
    (seen.log_probs + 0.3 * seen.entropy).sum().backward()
    pairs = ((seen.log_probs, picked), (seen.entropy, entropy), (part.grad, plain.grad[..., mine]))
    distances = [(a - b).abs().max() / b.abs().max().clamp(min=1) for a, b in pairs]
    return find_worst(distances)
