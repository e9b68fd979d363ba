"""Clipping, skipped updates, evaluation between steps, nothing to learn, shared heads; two ranks each."""

import pytest

from tests.engine.test_layouts import measured, wrong


@pytest.mark.world
def test_steps(installed):
    checks = "clipped left_out refused compared apart exchanged_early unlearned"
    checks += " prediction_in_turn shared_head"
    assert not wrong(measured(tuple(f"tests.engine.steps:{name}" for name in checks.split()), installed))
