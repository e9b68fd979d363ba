"""The benchmark of number formats: what it measures of a run, and when a model is fast enough."""

import math

import pytest

from benchmarks.gpu.formats import Least, is_fast_enough
from benchmarks.gpu.peers import RunFailed, train_by_bundle
from bundle.planning import build_plan
from bundle.recipe import load

SMALL = ("parallel.ep=1", "train.log_interval=1", "train.eval_interval=0", "data.validation=0")


@pytest.mark.parametrize(
    ("speeds", "is_fast"),
    [
        ({"bf16": 400.0, "tensorwise": 430.0, "blockwise": 441.0}, True),
        ({"bf16": 399.0, "tensorwise": 480.0, "blockwise": 480.0}, False),
        ({"bf16": 410.0, "tensorwise": 440.0, "blockwise": 450.0}, False),
        ({"bf16": 400.0}, True),
        ({"bf16": 400.0, "tensorwise": 0.0, "blockwise": 440.0}, False),
        ({"bf16": 0.0, "tensorwise": 440.0}, False),
    ],
)
def test_bf16_and_the_best_fp8_are_judged(speeds, is_fast):
    assert is_fast_enough(Least(400, 1.1), speeds) is is_fast


@pytest.mark.processes
def test_a_run_is_ended_after_its_steps_and_measured(tmp_path):
    arguments = [word for key in SMALL for word in ("--set", key)]
    run = train_by_bundle(["demo", "--backend", "cpu", *arguments], tmp_path, 3)
    assert len(run["losses"]) == 3 and len(run["seconds"]) == 2 and all(map(math.isfinite, run["losses"]))
    recipe = load("demo", SMALL)
    planned = build_plan(recipe, backend="cpu", per_node=1).step_flops
    assert run["flops"] == pytest.approx(planned, rel=0.05)
    assert run["micro_batch_size"] == recipe.train.micro_batch_size
    assert not (tmp_path / "run").exists()


@pytest.mark.processes
def test_a_run_that_ends_earlier_is_no_measurement(tmp_path):
    with pytest.raises(RunFailed, match=r"train\.steps"):
        train_by_bundle(["demo", "--backend", "cpu", "--set", "train.steps=-1"], tmp_path, 3)
