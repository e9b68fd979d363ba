"""The benchmark of switches: what it turns off, and which losses are equal."""

import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks.gpu import switches
from bundle.recipe import loss_chunks
from tests.recipe.test_loss_chunks import of


@pytest.mark.parametrize(
    ("losses", "gap", "step"),
    [
        ([[2.0, 1.0], [1.5, 0.5]], 0.0, 1),
        ([[2.0, 1.0], [1.5, 0.75]], 0.25, 2),
        ([[1.875, 1.0], [1.5, 0.5]], 0.125, 1),
        ([[1.875, 1.0], [1.25, 0.5]], 0.25, 2),
        ([[2.0, math.nan], [1.5, 0.5]], math.inf, 1),
    ],
)
def test_a_gap_is_the_largest_of_all_losses_and_steps(losses, gap, step):
    assert switches.find_largest_gap(losses, [[2.0, 1.0], [1.5, 0.5]]) == (gap, step)


def test_a_field_is_turned_off_and_the_others_stay():
    runtime = SimpleNamespace(build_config_options=lambda recipe: {"a": recipe, "b": True})
    switches.turn_field_off("b")(runtime)
    assert runtime.build_config_options("recipe") == {"a": "recipe", "b": False}
    switches.turn_field_off("c")(runtime)
    with pytest.raises(SystemExit, match="c is off"):
        runtime.build_config_options("recipe")


def test_megatron_s_loss_takes_the_place_of_chunks(monkeypatch):
    monkeypatch.setattr(loss_chunks, "_LEAST_LOGITS", loss_chunks._LEAST_LOGITS)
    assert loss_chunks.choose_loss_chunks(of(8192)) is not None
    switches.use_megatron_loss(None)
    assert loss_chunks.choose_loss_chunks(of(8192)) is None


@pytest.mark.parametrize(
    ("gap", "changed", "code"),
    [
        (0.0, 0.25, 0),
        (0.5, 0.25, 0),
        (0.625, 0.25, 1),
        (0.0, 0.0, 0),
        (0.125, 0.0, 1),
        (0.0, math.nan, 1),
        (math.nan, 0.25, 1),
        (None, 0.25, 1),
        (0.0, None, 1),
    ],
)
def test_a_far_loss_or_a_failed_run_ends_with_1(monkeypatch, gap, changed, code):
    gaps = {switches.AGAIN: 0.0, switches.CHANGED: changed, "kept logits": gap}
    runs = {name: None if gap is None else [[2.0, 1.0 + gap]] for name, gap in gaps.items()}
    monkeypatch.setattr(switches, "run", lambda name, options: runs[name])
    monkeypatch.setattr(sys, "argv", ["switches", "--only", "kept logits", "--at-once", "2"])
    assert switches.main() == code


def test_a_failed_first_run_ends_with_1(monkeypatch):
    monkeypatch.setattr(switches, "run", lambda name, options: None)
    monkeypatch.setattr(sys, "argv", ["switches", "--only", "kept logits"])
    assert switches.main() == 1


@pytest.mark.processes
def test_processes_train_and_print_their_losses():
    keys = ("parallel.ep=1", "data.validation=0", "train.global_batch_size=8", "model.dtype=bf16")
    runs = []
    for name in (switches.AGAIN, switches.CHANGED):
        command = [sys.executable, "-m", "benchmarks.gpu.switches", "--without", name, "--recipe", "demo"]
        command += ["--steps", "2", *(word for key in keys for word in ("--set", key))]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        runs.append(json.loads(ended.stdout.splitlines()[-1]))
    for losses in runs:
        assert len(losses) == 2 and all(len(row) == 2 and all(map(math.isfinite, row)) for row in losses)
    assert 0 < switches.find_largest_gap(*runs)[0] < 0.05
