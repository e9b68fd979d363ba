"""One command makes a trained model of a checkpoint and rows; transformers computes the loss that it says."""

import json
import signal
import time
from pathlib import Path

import pytest

from bundle.data.samples import choose_held_out
from bundle.errors import ExitCode
from bundle.recipe import load
from tests.command import NO_GPU, run_bundle, sets, start_bundle
from tests.journeys import checkpoints, oracle

pytestmark = pytest.mark.world
COUNT = 8
FP32 = sets("model.dtype=fp32")  # the one key: the default is bf16, whose rounding is larger than 1e-4


def run_journey(task: str, family: str, place: Path, *flags: str) -> tuple[float, Path, list[dict]]:
    """Return (the loss that the tool says at the end, the model that it began with, the rows)."""
    model = checkpoints.write_checkpoint(family, place / family)
    rows = (
        checkpoints.seen_chats(COUNT, place)
        if family.endswith("vl")
        else {"sft": checkpoints.chats, "dpo": checkpoints.pairs}[task](COUNT)
    )
    data = checkpoints.write_lines(place / "rows.jsonl", rows)
    words = (task, f"--model={model}", f"--data={data}", "--output=run", *flags)
    run_bundle(*words, cwd=place, code=0, environment=NO_GPU)
    lines = [json.loads(line) for line in (place / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["validation/loss"] for line in lines if "validation/loss" in line]
    return losses[-1], model, rows


def find_held_out(place: Path, rows: list[dict]) -> list[dict]:
    """Return the rows that the tool evaluates with, as its recipe divides them."""
    recipe = load(place / "run/recipe.yaml")
    chosen = choose_held_out(len(rows), recipe.data.validation, recipe.seed)
    return [row for row, is_held_out in zip(rows, chosen, strict=True) if is_held_out]


def check_sft(family: str, place: Path, *flags: str, within: float = 1e-4) -> None:
    loss, model, rows = run_journey("sft", family, place, *flags)
    export = place / "run/hf"
    assert loss == pytest.approx(oracle.sft_loss(export, find_held_out(place, rows), place), abs=within)
    assert oracle.sft_loss(export, rows, place) < oracle.sft_loss(model, rows, place)


def check_dpo(family: str, place: Path, *flags: str) -> None:
    """Check the loss to 1e-5: training at the default rate changes it by less than 1e-3."""
    loss, model, rows = run_journey("dpo", family, place, *flags)
    export = place / "run/hf"
    assert loss == pytest.approx(oracle.dpo_loss(export, model, find_held_out(place, rows)), abs=1e-5)
    assert oracle.dpo_loss(export, model, rows) < oracle.dpo_loss(model, model, rows)


def test_sft_of_qwen3(tmp_path):
    check_sft("qwen3", tmp_path, *FP32)


@pytest.mark.journeys
def test_sft_of_qwen3_without_a_key(tmp_path):
    check_sft("qwen3", tmp_path, within=2e-2)


@pytest.mark.journeys
@pytest.mark.parametrize("lora", [(), ("--lora",)], ids=["whole", "lora"])
@pytest.mark.parametrize("family", checkpoints.CONFIGS)
def test_sft_of_every_family(family, lora, tmp_path):
    check_sft(family, tmp_path, *lora, *FP32)


@pytest.mark.journeys
@pytest.mark.parametrize("lora", [(), ("--lora",)], ids=["whole", "lora"])
@pytest.mark.parametrize("family", [name for name in checkpoints.CONFIGS if not name.endswith("vl")])
def test_dpo_of_every_family(family, lora, tmp_path):
    check_dpo(family, tmp_path, *lora, *FP32)


@pytest.mark.journeys
def test_the_same_command_resumes_a_run_that_was_interrupted(tmp_path):
    model = checkpoints.write_checkpoint("qwen3", tmp_path / "qwen3")
    data = checkpoints.write_lines(tmp_path / "rows.jsonl", checkpoints.chats(COUNT))
    words = ["sft", f"--model={model}", f"--data={data}", "--epochs=40"]
    words += sets("train.log_interval=1")
    run = tmp_path / "runs/sft-qwen3"
    metrics = run / "metrics.jsonl"
    process = start_bundle(*words, cwd=tmp_path, start_new_session=True, stdout=None, stderr=None)
    try:
        deadline = time.monotonic() + 240
        while not (metrics.is_file() and metrics.read_text().count("train/loss") > 3):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=100) == ExitCode.PREEMPTED
    finally:
        process.kill()
    first = metrics.read_text().splitlines()
    said = run_bundle(*words, cwd=tmp_path, code=0, environment=NO_GPU).stdout
    again = metrics.read_text().splitlines()
    assert again[: len(first)] == first
    steps = [line["step"] for line in map(json.loads, again) if "train/loss" in line]
    assert steps == list(range(1, 7 * 40 + 1))
    assert "--prompt" in said and (run / "hf/model.safetensors").is_file()
    run_bundle(*words, cwd=tmp_path, code=ExitCode.USAGE, environment=NO_GPU)
