"""Delayed scaling: which call's values set which call's scale."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from bundle.backends.cpu.scaling import (
    E4M3,
    DelayedQuantiser,
    FirstMicroBatchWeightQuantiser,
    ForwardPassPurpose,
    build_quantisers,
    find_forward_or_recompute_phase,
)
from bundle.mcore import context
from bundle.recipe.recipe import FP8
from tests.engine.test_layouts import measured, wrong

HISTORY = 1024  # calls, what DelayedScaling(amax_history_len=1024) of Transformer Engine remembers


def full(value: float) -> torch.Tensor:
    return torch.full((2, 2), value)


def scales(values, phase=ForwardPassPurpose.TRAINED, of=None):
    """The scale of each call."""
    delayed = of or DelayedQuantiser(E4M3, None)
    return [scale_of(delayed(full(value), phase)) for value in values]


def scale_of(rounding):
    """A rounding's scale: the largest FP8 number is what everything beyond the range becomes."""
    return 448 / rounding(full(3e38), 1)[0, 0].item()


def test_a_call_is_scaled_by_the_largest_value_of_the_calls_before():
    assert scales([7.0, 14.0, 3.5, 1.0]) == [1, 64, 32, 32]


def test_zeros_and_infinities_leave_the_scale_as_it_was():
    assert scales([0.0, 7.0, 0.0, 7.0]) == [1, 1, 64, 64]
    assert scales([7.0, torch.inf, 7.0]) == [1, 64, 64]


def test_a_value_is_forgotten_after_the_history():
    delayed = DelayedQuantiser(E4M3, None)
    scales([448.0] + [7.0] * (HISTORY - 1), of=delayed)
    assert scales([7.0, 7.0], of=delayed) == [1, 64]


def test_evaluation_changes_nothing():
    delayed = DelayedQuantiser(E4M3, None)
    assert scales([7.0, 14.0], of=delayed) == [1, 64]
    assert scales([1e6, 1e6], ForwardPassPurpose.EVALUATED, of=delayed) == [32, 32]
    assert scales([7.0], of=delayed) == [32]


def test_recomputation_repeats_the_scales_in_order():
    delayed = DelayedQuantiser(E4M3, None)
    first = scales([7.0, 14.0], ForwardPassPurpose.CHECKPOINTED, of=delayed)
    assert scales([7.0, 14.0], ForwardPassPurpose.RECOMPUTED, of=delayed) == first == [1, 64]
    assert scales([1.0], of=delayed) == [32]


def weight_scales(values, phase=ForwardPassPurpose.TRAINED, of=None):
    """The scale of a weight in each micro-batch of one run of a schedule."""
    weight = of or FirstMicroBatchWeightQuantiser(E4M3, None)
    with context.schedule_run.set(object()):
        return scales(values, phase, weight)


def test_a_weight_is_cast_once_in_a_run():
    weight = FirstMicroBatchWeightQuantiser(E4M3, None)
    assert weight_scales([7.0, 14.0, 7.0], of=weight) == [1, 1, 1]
    assert weight_scales([3.5, 3.5], of=weight) == [64, 64]  # 14 was no first micro-batch's: nobody saw it
    assert scales([14.0, 14.0], of=weight) == [64, 32]  # outside a run each call casts


def test_a_weight_is_recomputed_by_the_copy_of_its_run():
    weight = FirstMicroBatchWeightQuantiser(E4M3, None)
    weight_scales([7.0], of=weight)
    with context.schedule_run.set(object()):
        first = scales([14.0, 14.0], ForwardPassPurpose.CHECKPOINTED, weight)
        assert first == scales([14.0, 14.0], ForwardPassPurpose.RECOMPUTED, weight) == [64, 64]
    assert weight_scales([1.0], ForwardPassPurpose.CHECKPOINTED, weight) == [32]


def test_evaluation_between_two_steps_leaves_a_weight_alone():
    weight = FirstMicroBatchWeightQuantiser(E4M3, None)
    weight_scales([7.0], of=weight)
    assert weight_scales([1e6, 1e6], ForwardPassPurpose.EVALUATED, weight) == [64, 64]
    assert weight_scales([7.0, 7.0], of=weight) == [64, 64]


def test_each_micro_batch_ages_a_weight_by_one():
    weight = FirstMicroBatchWeightQuantiser(E4M3, None)
    weight_scales([448.0] + [448.0] * (HISTORY - 1), of=weight)
    assert weight_scales([7.0], of=weight) == [1]  # the last scale that 448 set; it is forgotten now
    assert weight_scales([7.0], of=weight) == [64]


def test_both_products_of_a_matrix_have_one_scale_whatever_comes_in_between():
    delayed = DelayedQuantiser(E4M3, None)
    scales([7.0], of=delayed)
    rounding = delayed(full(7.0), ForwardPassPurpose.TRAINED)
    before = scale_of(rounding)
    scales([448.0, 448.0], of=delayed)
    assert scale_of(rounding) == before == 64


@pytest.mark.world
def test_ranks_share_the_largest_value_of_each_call(installed):
    names = tuple(f"tests.backends.cpu.fp8.shared:{name}" for name in ("calls", "layers"))
    assert not wrong(measured(names, installed))


def test_a_checkpoint_goes_on_alike():
    fp8 = FP8(scaling="delayed")
    first, second, bf16 = (build_quantisers(fp8, None) for _ in range(3))
    for each in (first.input, first.weight, first.gradient):
        each(full(7.0), ForwardPassPurpose.TRAINED), each(full(3.0), ForwardPassPurpose.TRAINED)
    second.restore(first.get_delayed_state())
    for a, b in zip((first.input, first.weight), (second.input, second.weight), strict=True):
        for value in (0.5, 14.0, 1.0):
            now = scale_of(a(full(value), ForwardPassPurpose.TRAINED))
            assert scale_of(b(full(value), ForwardPassPurpose.TRAINED)) == now > 1
    bf16.restore([])
    assert scale_of(bf16.input(full(7.0), ForwardPassPurpose.TRAINED)) == 1
    assert build_quantisers(FP8(scaling="blockwise"), None).get_delayed_state() == []


@pytest.mark.parametrize("training", [True, False])
def test_phases_are_told_from_where_the_pass_runs(training):
    seen = []

    def layer(x):
        seen.append(find_forward_or_recompute_phase(training=training))
        return x * 2

    x = torch.ones(3, requires_grad=True)
    checkpoint(layer, x, use_reentrant=True).sum().backward()
    layer(x)
    with torch.no_grad():
        layer(x)
    plain = ForwardPassPurpose.TRAINED if training else ForwardPassPurpose.EVALUATED
    dropped = ForwardPassPurpose.CHECKPOINTED if training else ForwardPassPurpose.EVALUATED
    assert seen == [dropped, ForwardPassPurpose.RECOMPUTED, plain, dropped]
