"""Training on files of megatron's own tool: blended, for epochs, evaluated on a set of its own."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.command import finish
from tests.runs.numbers import learned
from tests.training.test_interruption import train

pytestmark = pytest.mark.world


def flags(folder: Path, epochs: float) -> list[str]:
    keys = (
        "data.source=megatron", "data.separator=null", f"data.path=[{folder}/a,{folder}/b]",
        "data.weights=[3, 1]", "data.validation=0", f"data.validation_sets.own.path={folder}/b",
        "train.steps=null", f"train.epochs={epochs}", "train.log_interval=1", "optimizer.schedule=constant",
    )  # fmt: skip
    return [word for key in keys for word in ("--set", key)]


@pytest.mark.slow
def test_epochs_of_a_blend_go_on_as_if_they_had_not_ended(tmp_path):
    pytest.importorskip("megatron.core")
    from tests.data.test_indexed import build

    random = np.random.default_rng(1)
    for name, documents in (("a", 30), ("b", 12)):
        build(tmp_path / name, [[random.integers(0, 258, 20).tolist()] for _ in range(documents)], np.uint16)
    samples = (30 * 20 - 1) // 32 + (12 * 20 - 1) // 32  # 25 windows: 7 steps of 4, of 1.5 epochs 10
    assert samples == 25
    said = finish(train(tmp_path / "run", *flags(tmp_path, 1)), 0)
    assert "25 samples" in said and "7 steps" in said
    assert finish(train(tmp_path / "run", *flags(tmp_path, 1)), 2)  # finished
    finish(train(tmp_path / "run", *flags(tmp_path, 1.5), "--resume"), 0)
    finish(train(tmp_path / "straight", *flags(tmp_path, 1.5)), 0)
    gone_on, lines = (
        learned((tmp_path / name / "metrics.jsonl").read_text()) for name in ("run", "straight")
    )
    assert gone_on[-4:] == lines[-4:] and max(line["step"] for line in lines) == 10
    evaluated = [line for line in lines if "validation/own/loss" in line]
    assert [line["step"] for line in evaluated] == [10]
    result = json.loads((tmp_path / "straight" / "result.json").read_text())
    assert result["step"] == 10 and result["loss"] == evaluated[-1]["validation/own/loss"]
