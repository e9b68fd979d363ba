"""Objectives of calls and engines, divisors, masked values, ranks without micro-batches; two ranks each."""

import pytest

from tests.engine.test_layouts import measured, wrong


@pytest.mark.world
def test_objectives(installed):
    names = ("per_call", "divided", "masked", "empty", "nothing", "restored")
    assert not wrong(measured(tuple(f"tests.engine.objecting:{name}" for name in names), installed))
