"""Rates of a device: its share of the model's FLOPs, against the peak that is known of it."""

import random
import sys

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

from bundle.planning.size import compute_model_size
from bundle.recipe import load
from bundle.runs.metrics import PlainLines, Speed
from tests.planning.jobs import job
from tests.reference.configs import CONFIGS

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
RATE = "train/tflops_per_device"
NONE = np.zeros((0, 3), np.int64)  # no images


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7 << 30)


@pytest.mark.parametrize("seed", range(3))
def test_all_ranks_share_the_sequences_of_a_step(seed):
    recipe = load("demo", ["parallel={tp: 2, pp: 2, cp: 2, ep: 2, sequence_parallel: true}"])
    drawn = random.Random(seed)
    lengths = [drawn.randint(1, 99_999) for _ in range(drawn.randint(1, 50))]
    whole = compute_model_size(recipe.architecture).count_training_flops(lengths)
    assert Speed(recipe, "cpu", CPU, dp=1).compute_flops_per_rank(lengths, NONE) == pytest.approx(
        whole / 8, rel=1e-15
    )
    assert Speed(recipe, "cpu", CPU, dp=3).compute_flops_per_rank(lengths, NONE) == pytest.approx(
        whole / 24, rel=1e-15
    )
    assert Speed(load("demo"), "cpu", CPU, dp=1).compute_flops_per_rank(lengths, NONE) == pytest.approx(
        whole, rel=1e-15
    )


def test_a_window_counts_in_each_sequence_alone():
    """Short sequences leave nothing of their windows to long ones; pairs are counted one by one."""
    recipe = job(CONFIGS["gpt_oss"], data={"tokenizer": "hf:none"})
    lengths, window = [1, 8, 9, 10, 31, 3], recipe.architecture.window or 0
    pairs = {(query, key) for query in range(31) for key in range(query + 1)}
    size = compute_model_size(recipe.architecture)
    wanted = size.count_step_flops(
        sum(lengths),
        sum(query < length for length in lengths for query, _ in pairs),
        sum(query < length and query - key < window for length in lengths for query, key in pairs),
    )
    assert size.flops_per_windowed_pair and 0 < window < 31
    assert (
        Speed(recipe, "cpu", CPU, dp=1).compute_flops_per_rank(lengths, NONE)
        == size.count_training_flops(lengths)
        == wanted
    )


def test_mfu_is_of_the_peak_of_the_arithmetic_that_is_used(h200):
    arithmetic = ["backend=cuda", "model.dtype=bf16"]
    found = Speed(load("demo", arithmetic), "cuda", GPU, dp=1).compute_speed_and_memory(989e12, 2.0)
    assert (found[RATE], found["train/mfu"]) == pytest.approx((494.5, 0.5))
    assert found["memory/peak_bytes"] == 7 << 30
    for other in ("model.fp8.scaling=delayed", "model.dtype=fp32"):
        assert "train/mfu" not in Speed(
            load("demo", [*arithmetic, other]), "cuda", GPU, dp=1
        ).compute_speed_and_memory(1e12, 1.0)


def test_a_device_whose_peak_nobody_read_has_no_mfu(h200, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H0")
    recipe = load("demo", ["backend=cuda", "model.dtype=bf16"])
    assert set(Speed(recipe, "cuda", GPU, dp=1).compute_speed_and_memory(1e12, 1.0)) == {
        RATE,
        "memory/peak_bytes",
    }


def test_on_the_cpu_memory_is_the_process_s():
    held = torch.ones(64 << 20)
    found = Speed(load("demo"), "cpu", CPU, dp=1).compute_speed_and_memory(1e12, 4.0)
    assert found[RATE] == 0.25 and "train/mfu" not in found
    assert found["memory/peak_bytes"] > held.nbytes


def test_the_terminal_says_how_long_is_left_and_leaves_counters_to_the_files(capsys, messages):
    values = {"train/loss": 2.5, "train/seconds_left": 3725.4, "train/samples": 64, "memory/peak_bytes": 9}
    sink = PlainLines(10, sys.stdout)
    sink.write(4, values)
    sink.write(10, {**values, "train/seconds_left": 0.0})
    shown = capsys.readouterr().out
    first, last = shown.splitlines()
    assert "1:02:05" in first and "0:00:00" not in last
    assert "64" not in shown
    messages(shown)
