"""One command makes a trained model of a checkpoint and rows; transformers computes the loss that it says."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bundle.errors import ExitCode
from tests.journeys import checkpoints, oracle
from tests.launch.handed import bundle, sets

pytestmark = pytest.mark.world
COUNT = 8  # rows: as many as an evaluation has


def keys(model: Path) -> list[str]:
    chat = ["data.source=jsonl", f"data.tokenizer=hf:{model}", "data.template=chat", "data.packed=true"]
    return [*chat, "optimizer.lr=1e-3", "checkpoint.export=hf"]


def run_journey(task: str, family: str, place: Path, *flags: str) -> tuple[float, Path, list[dict]]:
    """Return (the loss on its rows that the tool says at the end, the model that it began with, the rows)."""
    model = checkpoints.write_checkpoint(family, place / family)
    rows = (
        checkpoints.seen_chats(COUNT, place)
        if family.endswith("vl")
        else {"sft": checkpoints.chats, "dpo": checkpoints.pairs}[task](COUNT)
    )
    data = checkpoints.write_lines(place / "rows.jsonl", rows)
    measure = [*keys(model), "model.dtype=fp32", f"data.validation_sets.rows.path={data}"]
    if "--lora" in flags:
        measure += ["model.lora.rank=16", "model.lora.alpha=32", "model.lora.targets=all-linear"]
    bundle(task, f"--model={model}", f"--data={data}", "--output=run", *flags, *sets(*measure), cwd=place)
    lines = [json.loads(line) for line in (place / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["validation/rows/loss"] for line in lines if "validation/rows/loss" in line]
    return losses[-1], model, rows


def check_sft(family: str, place: Path, *flags: str) -> None:
    loss, model, rows = run_journey("sft", family, place, *flags)
    found = oracle.sft_loss(place / "run/hf", rows, place)
    assert loss == pytest.approx(found, abs=1e-4)
    assert found < oracle.sft_loss(model, rows, place)


def check_dpo(family: str, place: Path, *flags: str) -> None:
    loss, model, rows = run_journey("dpo", family, place, *flags)
    found = oracle.dpo_loss(place / "run/hf", model, rows)
    assert loss == pytest.approx(found, abs=1e-4)
    assert found < oracle.dpo_loss(model, model, rows)


def test_sft_of_qwen3(tmp_path):
    check_sft("qwen3", tmp_path)


@pytest.mark.journeys
@pytest.mark.parametrize("lora", [(), ("--lora",)], ids=["whole", "lora"])
@pytest.mark.parametrize("family", checkpoints.CONFIGS)
def test_sft_of_every_family(family, lora, tmp_path):
    check_sft(family, tmp_path, *lora)


@pytest.mark.journeys
@pytest.mark.parametrize("lora", [(), ("--lora",)], ids=["whole", "lora"])
@pytest.mark.parametrize("family", [name for name in checkpoints.CONFIGS if not name.endswith("vl")])
def test_dpo_of_every_family(family, lora, tmp_path):
    check_dpo(family, tmp_path, *lora)


@pytest.mark.journeys
def test_the_same_command_resumes_a_run_that_was_interrupted(tmp_path):
    model = checkpoints.write_checkpoint("qwen3", tmp_path / "qwen3")
    data = checkpoints.write_lines(tmp_path / "rows.jsonl", checkpoints.chats(COUNT))
    words = ["sft", f"--model={model}", f"--data={data}", "--epochs=40"]
    words += sets("train.log_interval=1", *keys(model))
    metrics = tmp_path / "runs/sft-qwen3/metrics.jsonl"
    command = [sys.executable, "-m", "bundle", *words]
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
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
    said = bundle(*words, cwd=tmp_path)
    again = metrics.read_text().splitlines()
    assert again[: len(first)] == first
    steps = [line["step"] for line in map(json.loads, again) if "train/loss" in line]
    assert steps == list(range(1, 7 * 40 + 1))
    assert "--prompt" in said and (tmp_path / "runs/sft-qwen3/hf/model.safetensors").is_file()
    bundle(*words, cwd=tmp_path, code=ExitCode.USAGE)
