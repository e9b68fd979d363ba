"""Whole models (GQA; MLA, experts, MTP) train alike on ascend's core attention (emulated) and the cpu's."""

import json

import pytest


@pytest.mark.world
def test_losses_and_gradients_are_the_cpus(installed):
    seen = json.loads(installed.world.run("tests.backends.ascend.training", 1)[0].splitlines()[-1])
    assert set(seen) == {"dense bshd", "dense thd", "latent bshd", "latent thd"}
    for case in seen.values():
        assert case["ascend"] == pytest.approx(case["cpu"], rel=2e-5)
