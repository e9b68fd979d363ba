"""A preference run from rows to its result: it begins at the reference, which it computes once and keeps."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests import command
from tests.command import finish

pytestmark = pytest.mark.world
TINY = (
    "task=dpo",
    "dpo.beta=0.5",
    "train.steps=8",
    "optimizer.warmup_steps=0",
    "optimizer.lr=3e-3",
    "optimizer.min_lr=0",
    "train.eval_interval=0",
    "train.log_interval=1",
    "train.global_batch_size=4",
    "train.micro_batch_size=2",
    "data.source=jsonl",
    "data.sequence_length=64",
    "data.validation=0.25",
    "model.config.num_hidden_layers=2",
    "model.config.hidden_size=32",
    "checkpoint.interval=5",
    "metrics.tensorboard=false",
)


def write_pairs(directory: Path) -> Path:
    rows = directory / "rows.jsonl"
    pairs = [{"prompt": f"{n}?", "chosen": "yes " * (1 + n % 3), "rejected": "no " * 3} for n in range(16)]
    rows.write_text("\n".join(map(json.dumps, pairs)))
    return rows


@pytest.mark.slow
def test_a_run_begins_at_its_reference_and_goes_on_with_it(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    rows = write_pairs(tmp_path)
    run, keys = tmp_path / "run", (*TINY, f"data.path={rows}")
    assert "answers in" in finish(command.start_training("demo", run, keys))
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in metrics if "train/loss" in line]
    # Nothing tells the model from the reference yet; then it prefers what it is shown.
    assert (
        abs(trained[0]["train/loss"] - math.log(2)) < 1e-4 and abs(trained[0]["train/rewards/margins"]) < 1e-4
    )
    assert trained[-1]["train/loss"] < 0.5 and trained[-1]["train/rewards/accuracies"] == 1
    (evaluated,) = (line for line in metrics if "validation/loss" in line)
    assert evaluated["validation/rewards/margins"] > 0.5

    kept = run / "reference.npz"
    before = np.load(kept)["log_probs"]
    assert len(before) == 32 and np.isfinite(before).all() and (before < 0).all()

    # As if it had been killed while it computed them, before its first step: what is there is taken, and of
    # what is missing the portion that it is in is computed, which is a global batch.
    partial = before - 1
    partial[:2] = np.nan
    with np.load(kept) as held:
        facts = {name: held[name] for name in ("data", "weights")}
    np.savez(kept, log_probs=partial, **facts)
    shutil.rmtree(run / "checkpoints")
    for left in ("result.json", "metrics.jsonl"):
        (run / left).unlink()
    assert "8 answers" in _compact(finish(command.start_training("demo", run, keys)))
    again = np.load(kept)["log_probs"]
    computed = np.isclose(again, before, rtol=1e-6)
    assert computed[:2].all() and computed.sum() == 8 and np.array_equal(again[~computed], partial[~computed])
    before = again

    longer = (*keys, "train.steps=10")
    kept.rename(tmp_path / "away.npz")
    said = finish(command.start_training("demo", run, longer, "--resume"), 1)
    assert kept.name in said and "--fresh" in said
    (tmp_path / "away.npz").rename(kept)
    assert "answers in" not in finish(command.start_training("demo", run, longer, "--resume"))
    assert np.array_equal(np.load(kept)["log_probs"], before)


@pytest.mark.slow
@pytest.mark.parametrize(("scaling", "nats"), [("blockwise", 1e-5), ("tensorwise", 0.1), ("delayed", 0.1)])
def test_with_fp8_a_run_begins_near_its_reference(tmp_path: Path, scaling: str, nats: float) -> None:
    """Blockwise, an answer has the same log-probability in any micro-batch."""
    pytest.importorskip("megatron.core")
    rows = write_pairs(tmp_path)
    keys = (
        *TINY,
        f"data.path={rows}",
        "model.dtype=bf16",
        f"model.fp8={{scaling: {scaling}}}",
        "train.steps=4",
    )
    finish(command.start_training("demo", tmp_path / "run", keys))
    metrics = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    losses = [line["train/loss"] for line in metrics if "train/loss" in line]
    assert losses[0] == pytest.approx(math.log(2), abs=nats) and losses[-1] < losses[0]


def _compact(said: str) -> str:
    """On one line, however wide the terminal was."""
    return " ".join(said.split())
