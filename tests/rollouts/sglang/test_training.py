"""The arithmetic task over contract servers (transformers behind them) asks and learns as in one process."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

from tests.rollouts.sglang.site import build_python

pytestmark = [pytest.mark.world, pytest.mark.slow]
STEPS = {"train.steps": 4, "rl.evaluation": "null"}


@pytest.fixture(scope="module")
def runs(installed, tmp_path_factory):
    directory: Path = tmp_path_factory.mktemp("runs")
    python = build_python(directory / "environment")
    servers = {
        "rl.rollout.engine": "sglang",
        "rl.rollout.python": python,
        "rl.rollout.weights_folder": str(directory / "weights"),
    }
    # The server is killed at its 40th answer, in the second step; rank 0 alone speaks with it.
    servers["rl.rollout.arguments"] = '["--kill-at=40", "--is-new"]'
    alone, ranks = ({name: {"overrides": STEPS | more}} for name, more in (("one", {}), ("servers", servers)))
    installed.world.run("tests.rl.training", 1, str(directory), json.dumps(alone), timeout=400)
    installed.world.run("tests.rl.training", 2, str(directory), json.dumps(ranks), timeout=400)
    in_buckets = json.dumps({"buckets": {"overrides": STEPS | servers}})
    module = "tests.rollouts.sglang.bucket_training"
    installed.world.run(module, 2, str(directory), in_buckets, timeout=400)
    assert not [*(directory / "weights").iterdir()]
    return directory


def read_answers(run: Path) -> list[list[dict[str, Any]]]:
    paths = sorted((run / "rollouts").glob("step-*.jsonl"))
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


@pytest.mark.parametrize("run", ["servers", "buckets"])
def test_answers_are_those_of_one_process(runs, run):
    ours, theirs = read_answers(runs / run), read_answers(runs / "one")
    assert len(ours) == len(theirs) == 2
    for batch, same_batch in zip(ours, theirs, strict=True):
        for answer, same in zip(batch, same_batch, strict=True):
            for key in ("question", "answer", "prompt_ids", "ids", "text", "reward", "versions"):
                assert answer[key] == same[key]
            np.testing.assert_allclose(answer["log_probs"], same["log_probs"], rtol=0, atol=1e-5)
    lines, others = (
        [json.loads(line) for line in (runs / run / "metrics.jsonl").read_text().splitlines()]
        for run in (run, "one")
    )
    for key in ("train/loss", "reward/mean"):
        values = [line[key] for line in lines if key in line]
        assert values and values == pytest.approx([line[key] for line in others if key in line], rel=1e-5)


@pytest.mark.parametrize("run", ["servers", "buckets"])
def test_a_server_that_was_killed_was_started_anew(runs, run):
    logs = runs / run / "logs" / "rollout"
    log = "".join(path.read_text() for path in logs.glob("server-*.log"))
    assert (logs / "model" / "killed").exists() and log.count("\npid ") == 2
    assert f"cuda_graph_max_bs_decode={len(read_answers(runs / run)[0])}" in log
    config = json.loads((logs / "model" / "config.json").read_text())
    assert "eos_token_id" not in config and config["vocab_size"] == 258
