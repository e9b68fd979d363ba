"""What training begins with, and says: the weights of model.path, random ones, or a checkpoint."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.families import reference
from tests.families.cases import CASES

CASE = next(case for case in CASES if case.name == "llama llama3")
_TEXT = "a" * 50_000  # every sample is the same: what is drawn first changes no loss
_LENGTH = 32


def train(directory: Path, model: Path, *overrides: str, code: int = 0, flags: Sequence[str] = ()) -> str:
    text = directory.with_suffix(".txt")
    text.write_text(_TEXT)
    values = (
        f"model.path={model}", "model.dtype=fp32", f"data.path=[{text}]", "data.tokenizer=bytes",
        "model.config.vocab_size=258", "optimizer.warmup_steps=0", "checkpoint.interval=1", *overrides,
    )  # fmt: skip
    recipe = directory.with_suffix(".yaml")
    recipe.write_text(
        "name: beginning\nbackend: cpu\nmodel: {path: none}\n"
        f"data: {{source: text, path: [none], tokenizer: bytes, sequence_length: {_LENGTH}}}\n"
        "train: {steps: 1, global_batch_size: 2, micro_batch_size: 2}\n"
    )
    command = [
        sys.executable,
        "-m",
        "bundle",
        "train",
        str(recipe),
        "--run-directory",
        str(directory),
        *flags,
    ]
    for value in values:
        command += ["--set", value]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def first_loss(directory: Path) -> float:
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return next(float(line["train/loss"]) for line in lines if "train/loss" in line)


@pytest.mark.world
def test_a_run_begins_with_the_weights_of_its_path_and_says_so(tmp_path):
    pytest.importorskip("megatron.core")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = tmp_path / "model"
    case = CASE.__class__(CASE.name, CASE.config | {"vocab_size": 258})
    reference.write(case, model)
    said = train(tmp_path / "loaded", model)
    assert f"begins with {model}: " in said and "random" not in said
    torch.set_num_threads(1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    row = torch.full((1, _LENGTH + 1), ord("a"))
    with torch.no_grad():
        wanted = float(theirs(row, labels=row).loss)
    assert first_loss(tmp_path / "loaded") == pytest.approx(wanted, rel=1e-5)

    said = train(tmp_path / "random", model, "model.weights=random")
    assert "begins with random weights: model.weights says so" in said
    assert first_loss(tmp_path / "random") != pytest.approx(wanted, rel=1e-2)

    for file in model.glob("*.safetensors*"):
        file.unlink()
    said = train(tmp_path / "loaded", model, "train.steps=2", flags=["--resume"])
    assert "goes on after step 1" in said and "begins with" not in said
    assert "random weights: " + str(model) + " holds none" in train(tmp_path / "none", model)
    assert "there are no weights" in train(tmp_path / "asked", model, "model.weights=load", code=2)
