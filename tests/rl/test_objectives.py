"""Losses of a policy against their references: values, gradients, measures, however the answers are cut."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies

pytest.importorskip("megatron.core")

from bundle.engine import Scores
from bundle.engine.losses import MeasureSums
from bundle.mcore.groups import ParallelGroup
from bundle.recipe.alignment import Alignment
from bundle.rl.corrections import Correction
from bundle.rl.objectives import PolicyLossSettings, PolicyObjective
from tests.rl import building
from tests.rl.cases import CASES
from tests.rl.references import Answer, Case, compute, draw, track

GROUPS: Any = SimpleNamespace(cp=ParallelGroup(1, 0, None))  # type: ignore[arg-type]
LENGTHS = (9, 13, 5, 1, 8, 10, 16, 2, 7, 6, 4, 9)  # of predictions; the last but one is learned nowhere
CUTS = {"one": (12,), "three": (4, 4, 4), "uneven": (1, 9, 2), "with an empty one": (6, 4, 1, 1)}
FORMS = ("packs", "padded rows", "rows")


def evaluate(
    case: Case, answers: list[Answer], cut: tuple[int, ...], form: str, dtype: torch.dtype
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss as the engine adds it up, and the measures."""
    objective = PolicyObjective(building.settings(case), GROUPS)
    sums = MeasureSums(objective.measures, torch.device("cpu"))
    total, weight, first = torch.zeros((), dtype=dtype), torch.zeros((), dtype=dtype), 0
    for size in cut:
        part = answers[first : first + size]
        first += size
        alignment = Alignment("thd" if form == "packs" else "bshd", tp=2, sequence_parallel=True)
        batch = building.micro_batch(part, alignment, case.mean, dtype=dtype, rows=form == "rows")
        scores = Scores(
            *(
                batch.packing.pack_concatenated_tokens(
                    torch.cat([getattr(one, name) for one in part]), fill=math.nan
                )
                for name in ("log_probs", "entropy")
            )
        )
        result = objective(batch, scores)
        assert result.shape == (1 + len(objective.measures), *batch.loss_mask.shape)
        total = total + (result[0].where(batch.loss_mask > 0, 0) * batch.loss_mask).sum()
        weight += batch.learned_tokens if batch.learned_sequences is None else batch.learned_sequences
        sums.add(result[1:], batch.loss_mask)
    return total / (weight if case.divisor is None else case.divisor), sums.finish(
        sums.combine_rank_values(sums.values[None])
    )


def compare(
    case: Case, answers: list[Answer], cut: tuple[int, ...], form: str, dtype: torch.dtype, tolerance: float
) -> None:
    typed = [
        Answer(*(one.to(dtype) if one.is_floating_point() else one for one in vars(answer).values()))
        for answer in answers
    ]
    seen, exact = track(typed), track([replace(one) for one in typed])
    for one in exact:
        one.log_probs, one.entropy = (
            x.detach().double().requires_grad_() for x in (one.log_probs, one.entropy)
        )
    loss, measures = evaluate(case, seen, cut, form, dtype)
    wanted, wanted_measures = compute(case, exact)
    loss.backward()
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=tolerance, abs=tolerance)
    for name in ("log_probs", "entropy"):
        ours, theirs = (
            torch.cat(
                [g if (g := getattr(one, name).grad) is not None else one.old.double() * 0 for one in of]
            )
            for of in (seen, exact)
        )
        theirs = theirs.nan_to_num(0.0)
        ours = ours.double().nan_to_num(0.0) if not case.entropy and name == "entropy" else ours.double()
        assert torch.isfinite(ours).all()
        assert (ours - theirs).abs().max() <= tolerance * max(float(theirs.abs().max()), 1e-9)
    assert measures.keys() == wanted_measures.keys()
    for name, value in wanted_measures.items():
        assert measures[name] == pytest.approx(value, rel=2e-6, abs=2e-6), name


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_reference(name, cut):
    for form in FORMS:
        lengths = (8,) * 12 if form == "rows" else LENGTHS
        answers = draw(lengths, seed=4)
        compare(CASES[name], answers, CUTS[cut], form, torch.float64, 1e-12)
        compare(CASES[name], answers, CUTS[cut], form, torch.float32, 1e-6)


@settings(max_examples=50)
@given(
    name=strategies.sampled_from(sorted(CASES)),
    cut=strategies.sampled_from(sorted(CUTS)),
    form=strategies.sampled_from(FORMS[:2]),
    seed=strategies.integers(0, 2**20),
    spread=strategies.sampled_from([0.0, 0.02, 0.3, 1.5]),
    lengths=strategies.lists(strategies.integers(1, 30), min_size=12, max_size=12),
)
def test_random_answers_agree(name, cut, form, seed, spread, lengths):
    answers = draw(tuple(lengths), seed, spread=spread)
    compare(CASES[name], answers, CUTS[cut], form, torch.float64, 1e-11)


def test_every_bound_and_veto_binds_somewhere():
    """The comparisons above would not notice a bound that nothing reaches."""
    answers = draw(LENGTHS, seed=4)
    for name, case in CASES.items():
        measures = compute(case, answers)[1]
        fractions = {key: value for key, value in measures.items() if "fraction" in key}
        if case.kind == "cispo" and case.low == 1:
            assert fractions.pop("clip_fraction/low") == 0
        if case.veto is None:
            fractions.pop("correction/veto_fraction", None)
        assert all(0 < value < 1 for value in fractions.values()), (name, fractions)


def test_log_ratios_far_apart_stay_finite():
    case = Case(kl=0.1, kl_kind="k3", correction="mask", bounds=(0.5, 2.0), veto=1e-4)
    answers = draw(LENGTHS, seed=1, spread=500.0)
    for form in FORMS[:2]:
        seen = track(answers)
        loss, measures = evaluate(case, seen, (12,), form, torch.float64)
        loss.backward()
        assert math.isfinite(loss.item()) and all(map(math.isfinite, measures.values()))
        for one in seen:
            assert one.log_probs.grad is not None and torch.isfinite(one.log_probs.grad).all()


def test_without_rollout_log_probs_the_mismatch_is_the_policy_against_the_old():
    answers = draw(LENGTHS, seed=3)
    batch = building.micro_batch(answers, Alignment("thd"), "token", dtype=torch.float64)
    batch = replace(
        batch,
        extra_tensors={k: v for k, v in batch.extra_tensors.items() if k in ("advantages", "old_log_probs")},
    )
    objective = PolicyObjective(PolicyLossSettings(), GROUPS)
    scores = Scores(
        *(
            batch.packing.pack_concatenated_tokens(torch.cat([getattr(one, n) for one in answers]))
            for n in ("log_probs", "entropy")
        )
    )
    result = dict(zip(objective.measures, objective(batch, scores)[1:], strict=True))
    change = (scores.log_probs - batch.extra_tensors["old_log_probs"]).where(batch.loss_mask > 0, 0)
    measure = "mismatch/max_log_prob_difference"
    assert torch.equal(result[measure], change.abs())
    assert torch.equal(result["mismatch/k3"], result["approx_kl"])


def test_small_mismatches_are_not_lost_in_rounding():
    """float32's step at 1 is 1.2e-7: exp(d) - 1 - d would be noise of that size."""
    answers = draw((400,), seed=3)
    for one in answers:
        one.old = one.log_probs.clone()
        one.rollout = one.log_probs + 1e-5 * torch.randn(400, generator=torch.Generator().manual_seed(2))
    case = Case()
    _, measures = evaluate(case, answers, (1,), "packs", torch.float64)
    batch = building.micro_batch(answers, Alignment("thd"), "token")
    gap = (batch.extra_tensors["old_log_probs"] - batch.extra_tensors["rollout_log_probs"]).double()
    wanted = float((gap.expm1() - gap).sum() / batch.learned_tokens)
    objective = PolicyObjective(building.settings(case), GROUPS)
    scores = Scores(batch.extra_tensors["old_log_probs"], batch.extra_tensors["old_log_probs"])
    result = dict(zip(objective.measures, objective(batch, scores)[1:], strict=True))
    seen = float(result["mismatch/k3"].double().sum() / batch.learned_tokens)
    assert wanted > 1e-11 and abs(seen - wanted) < 2e-11
    assert measures["mismatch/k3"] == pytest.approx(5e-11, rel=0.3)


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"clip": (1.5, 0.2)}, "clip"),
        ({"clip": (0.2, math.nan)}, "clip"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"dual_clip": math.nan}, "dual_clip"),
        ({"dual_clip": 3.0, "kind": "cispo"}, "dual_clip"),
        ({"entropy": -0.1}, "entropy"),
        ({"kl": math.nan}, "kl"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, key):
    with pytest.raises(ValueError, match=f"^{key}:"):
        PolicyLossSettings(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "mask", "low": 2.0},
        {"low": 0.5},
        {"level": "geometric"},
        {"veto": 0.0},
        {"high": math.nan},
        {"veto": math.nan},
        {"veto": 1.0},
    ],
)
def test_corrections_that_contradict_are_refused(wrong):
    with pytest.raises(ValueError, match=r"^correction"):
        Correction(**wrong)


def test_what_a_micro_batch_lacks_is_named():
    batch = building.micro_batch(draw((5,), seed=1), Alignment("thd"), "token")
    scores = Scores(batch.loss_mask, batch.loss_mask)
    for policy, name in (
        (PolicyLossSettings(), "old_log_probs"),
        (PolicyLossSettings(kl=0.1), "reference_log_probs"),
        (PolicyLossSettings(correction=Correction()), "rollout_log_probs"),
    ):
        rest = {key: value for key, value in batch.extra_tensors.items() if key != name}
        with pytest.raises(ValueError, match=name):
            PolicyObjective(policy, GROUPS)(replace(batch, extra_tensors=rest), scores)
    with pytest.raises(ValueError, match=r"^mean: token"):
        PolicyObjective(PolicyLossSettings("gspo"), GROUPS)(batch, scores)
