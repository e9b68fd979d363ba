"""Predicted tensors and bytes are those of real models, wrappers and optimizers, on every rank."""

import json

import pytest


@pytest.mark.world
@pytest.mark.slow
def test_what_is_predicted_is_there(core):
    (said,) = core.world.run("tests.planning.builder", 1, timeout=500)
    seen = json.loads(said.splitlines()[-1])
    assert seen["wrong"] == []
    assert seen["ranks"] > (30 if core.tree else 50)
