"""A checkpoint is as large as its plan says, which the run keeps beside it."""

import json

import pytest

from tests.command import finish, start_training

# A pipeline whose last stage has a copy of the embedding, for MTP; experts; no multiple of 128 as vocabulary.
OVERRIDES = (
    "model.dtype=bf16",
    "model.config.hidden_size=256",
    "model.config.vocab_size=1000",
    "parallel.ep=1",
    "parallel.pp=2",
    "train.steps=1",
    "train.eval_batches=1",
    "train.global_batch_size=4",
    "train.micro_batch_size=2",
    "optimizer.warmup_steps=0",
)


@pytest.mark.world
@pytest.mark.slow
def test_bytes_of_a_checkpoint(tmp_path):
    finish(start_training("demo", tmp_path / "run", OVERRIDES))
    planned = json.loads((tmp_path / "run/job.json").read_text())["plan"]["checkpoint"]["bytes"]
    written = sum(file.stat().st_size for file in (tmp_path / "run/checkpoints").rglob("*") if file.is_file())
    assert planned < written < 1.05 * planned, "each tensor and each file has a head of its own"
