"""A model's directory and rows, and no other key that decides how it trains: the loss is transformers'."""

import json

import pytest

from tests.command import NO_GPU, run_bundle, sets
from tests.journeys import checkpoints, oracle

pytestmark = [pytest.mark.world, pytest.mark.slow]
RECIPE = """\
name: mine
task: sft
model: {path: model}
data: {source: jsonl, path: [rows.jsonl], sequence_length: 512, validation: 0}
train: {steps: 3, global_batch_size: 1, log_interval: 1, eval_interval: 0}
"""


def test_the_first_loss_is_that_of_the_models_own_tokenizer_and_template(tmp_path):
    model = checkpoints.write_checkpoint("qwen3", tmp_path / "model")
    rows = checkpoints.chats(8)
    checkpoints.write_lines(tmp_path / "rows.jsonl", rows)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    here = {"cwd": tmp_path, "code": 0, "environment": NO_GPU}
    told = json.loads(run_bundle("plan", "mine.yaml", "--json", **here).stdout)["settings"]
    origins = {setting["key"]: setting["origin"] for setting in told}
    assert origins["data.tokenizer"] == "model.path" and "full SFT" in origins["optimizer.lr"]
    fp32 = sets("model.dtype=fp32")
    checked = json.loads(run_bundle("check", "mine.yaml", "--json", *fp32, **here).stdout)
    assert checked["training"] == 1, "all rows are one pack"
    assert {each["key"]: each["origin"] for each in checked["settings"]}["model.dtype"].startswith("--set")
    run_bundle("train", "mine.yaml", *fp32, **here)
    run = tmp_path / "runs/mine"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first = next(line["train/loss"] for line in metrics if "train/loss" in line)
    assert first == pytest.approx(oracle.sft_loss(model, rows, tmp_path), abs=1e-4)
    written = (run / "recipe.yaml").read_text()
    assert "tokenizer: hf:model" in written and "lr: 1.0e-05" in written.replace("1e-05", "1.0e-05")
    assert (run / "hf/tokenizer.json").is_file()
