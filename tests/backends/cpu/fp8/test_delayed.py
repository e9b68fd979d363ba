"""Delayed scaling: which call's values set which call's scale."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from bundle.backends.cpu.runtime.fp8.delayed import HISTORY, DelayedScale, Phase, phase_of
from bundle.backends.cpu.runtime.fp8.scales import E4M3


def full(value: float) -> torch.Tensor:
    return torch.full((2, 2), value)


def scales(values, phase=Phase.TRAINED, of=None):
    delayed = of or DelayedScale(E4M3, None)
    return [delayed.of(full(value), phase).item() for value in values]


def test_a_call_is_scaled_by_the_largest_value_of_the_calls_before():
    assert scales([7.0, 14.0, 3.5, 1.0]) == [1, 64, 32, 32]


def test_zeros_and_infinities_leave_the_scale_as_it_was():
    assert scales([0.0, 7.0, 0.0, 7.0]) == [1, 1, 64, 64]
    assert scales([7.0, torch.inf, 7.0]) == [1, 64, 64]


def test_a_value_is_forgotten_after_the_history():
    delayed = DelayedScale(E4M3, None)
    scales([448.0] + [7.0] * (HISTORY - 1), of=delayed)
    assert scales([7.0, 7.0], of=delayed) == [1, 64]


def test_evaluation_changes_nothing():
    delayed = DelayedScale(E4M3, None)
    assert scales([7.0, 14.0], of=delayed) == [1, 64]
    assert scales([1e6, 1e6], Phase.EVALUATED, of=delayed) == [64, 64]
    assert scales([7.0], of=delayed) == [32]


def test_recomputation_repeats_the_scales_in_order():
    delayed = DelayedScale(E4M3, None)
    first = scales([7.0, 14.0], Phase.CHECKPOINTED, of=delayed)
    assert scales([7.0, 14.0], Phase.RECOMPUTED, of=delayed) == first == [1, 64]
    assert scales([1.0], of=delayed) == [32]


@pytest.mark.parametrize("training", [True, False])
def test_phases_are_told_from_where_the_pass_runs(training):
    seen = []

    def layer(x):
        seen.append(phase_of(training=training))
        return x * 2

    x = torch.ones(3, requires_grad=True)
    checkpoint(layer, x, use_reentrant=True).sum().backward()
    layer(x)
    with torch.no_grad():
        layer(x)
    plain = Phase.TRAINED if training else Phase.EVALUATED
    dropped = Phase.CHECKPOINTED if training else Phase.EVALUATED
    assert seen == [dropped, Phase.RECOMPUTED, plain, dropped]
