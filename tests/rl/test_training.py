"""A small policy trained in every layout: the same answers, the same losses, and files that replay."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

PACKED = {"data.packed": "true", "train.micro_batch_size": 1}
ALONE: dict[str, dict[str, Any]] = {
    "one": {},
    "packed": {"overrides": PACKED},
    "experts": {"recipe": "grpo-experts-cpu"},
    "gspo": {
        "overrides": {
            "rl.loss": "{kind: gspo, kl: 0.1, kl_kind: k3}",
            "rl.loss.correction": "{kind: mask, level: sequence, high: 9}",
            "rl.old_log_probs": "trainer",
            "train.global_batch_size": 16,
            "rl.num_iterations": 2,
            "rl.warm_start_steps": 0,
            "rl.dynamic_sampling": 2,
            "rl.overlong_buffer": 2,
            "checkpoint.keep_best": "accuracy",
        }
    },
    "kl": {"overrides": {"rl.loss": "{kl: 0.1, kl_kind: k2, mean: token}", "rl.warm_start_steps": 0}},
    "reinforce": {
        "overrides": {
            "rl.advantage": "reinforce_plus_plus",
            "rl.loss": "{kl: 0.1, kl_kind: k1, mean: token}",
            "rl.warm_start_steps": 0,
            "rl.evaluation.samples": 3,
        }
    },
}
REWARD = "[{{kind: python, function: FILE:{}}}]"
ENDINGS: dict[str, dict[str, Any]] = {
    "failing": {"overrides": {"rl.rewards": REWARD.format("fail_on_some")}, "error": "rl.max_failed: "},
    "tolerated": {"overrides": {"rl.rewards": REWARD.format("fail_on_some"), "rl.max_failed": 0.3}},
    "flat": {
        "overrides": {"rl.rewards": REWARD.format("like_all"), "rl.max_flat_steps": 3, "train.steps": 50},
        "error": "rl.max_flat_steps: ",
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"parallel": {"tp": 2, "sequence_parallel": "true"}},
    "pp2": {"parallel": {"pp": 2}},
    "packed cp2": {"parallel": {"cp": 2}, "overrides": PACKED},
    "packed pp2": {"parallel": {"pp": 2}, "overrides": PACKED},
    # Fewer questions than ranks: one of them answers nothing.
    "few": {
        "overrides": {
            "rl.prompts_per_step": 1,
            "rl.num_generations": 8,
            "train.global_batch_size": 8,
            "rl.evaluation": "null",
        }
    },
    "experts ep2": {"recipe": "grpo-experts-cpu", "parallel": {"ep": 2}},
}
SEQUENTIAL = ("train/loss", "train/mtp_1_loss", "train/entropy", "train/grad_norm", "reward/mean")


@pytest.fixture(scope="module")
def runs(core, tmp_path_factory):
    directory: Path = tmp_path_factory.mktemp("runs")
    core.world.run("tests.rl.training", 1, str(directory), json.dumps(ALONE), timeout=400)
    core.world.run("tests.rl.training", 2, str(directory), json.dumps(LAYOUTS), timeout=500)
    assert core.tree is not None or not [*directory.glob("*.refused")]
    return directory


def read_lines(run: Path) -> list[dict[str, Any]]:
    if run.with_name(f"{run.name}.refused").exists():
        pytest.skip(f"refused: {run.with_name(f'{run.name}.refused').read_text()}")
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def read_answers(run: Path) -> list[list[dict[str, Any]]]:
    read_lines(run)
    paths = sorted((run / "rollouts").glob("step-*.jsonl"))
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


@pytest.mark.world
@pytest.mark.parametrize("layout", ["packed", *(name for name in LAYOUTS if name != "few")])
def test_a_layout_asks_and_learns_what_one_process_does(runs, layout):
    alone = runs / ("experts" if "experts" in layout else "one")
    ours, theirs = read_answers(runs / layout), read_answers(alone)
    assert len(ours) == len(theirs) == 6
    for batch, same_batch in zip(ours, theirs, strict=True):
        for answer, same in zip(batch, same_batch, strict=True):
            for key in ("place", "question", "answer", "prompt_ids", "ids", "text", "reward", "versions"):
                assert answer[key] == same[key]
            np.testing.assert_allclose(answer["log_probs"], same["log_probs"], rtol=0, atol=1e-5)
    lines, others = read_lines(runs / layout), read_lines(alone)
    assert [line["step"] for line in lines] == [line["step"] for line in others]
    for line, other in zip(lines, others, strict=True):
        assert line.keys() - {"train/straggler_ratio"} == other.keys()
        for key in SEQUENTIAL:
            if line.get(key) is not None or other.get(key) is not None:  # entropy is none of a warm start
                assert line[key] == pytest.approx(other[key], rel=1e-5, abs=1e-7), key


@pytest.mark.world
@pytest.mark.parametrize("run", ["one", "gspo", "reinforce", "pp2", "packed cp2"])
def test_the_rollout_engine_computes_as_the_trainer_does(runs, run):
    steps = [line for line in read_lines(runs / run) if line.get("train/mismatch/k3") is not None]
    assert steps
    largest = "train/mismatch/max_log_prob_difference"
    for line in steps:
        assert line["train/mismatch/k3"] <= 1e-7
        assert line[largest] <= 1e-4


@pytest.mark.world
def test_a_run_learns_evaluates_and_says_what_it_came_to(runs):
    lines = read_lines(runs / "one")
    evaluated = [line["step"] for line in lines if "evaluation/accuracy" in line]
    assert evaluated == [2, 3, 6, 8]  # before the first answers, at multiples of 3, at last
    trained = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in trained] == [*range(1, 9)]
    third, seventh = trained[2], trained[6]
    # Sampling and evaluations between updates count, too.
    assert seventh["train/seconds_left"] == pytest.approx((seventh["time"] - third["time"]) / 4, rel=0.2)
    result = json.loads((runs / "one" / "result.json").read_text())
    assert result["step"] == 8 and result["rollouts"] == 6 and result["skipped_steps"] == 0
    assert result["evaluation"]["evaluation/accuracy"] == 0
    assert len({line["reward/mean"] for line in lines if "reward/mean" in line}) > 3


@pytest.mark.world
def test_a_rank_without_a_question_takes_part(runs):
    assert {len(batch) for batch in read_answers(runs / "few")} == {8}
    assert json.loads((runs / "few" / "result.json").read_text())["step"] == 8


@pytest.mark.world
def test_versions_are_the_steps_of_the_weights(runs):
    versions = [
        {version for answer in batch for version in answer["versions"]}
        for batch in read_answers(runs / "one")
    ]
    assert versions == [{step} for step in range(2, 8)]


@pytest.mark.world
def test_several_updates_learn_the_answers_of_a_step(runs):
    lines = [line for line in read_lines(runs / "gspo") if "train/loss" in line]
    assert [line["step"] for line in lines] == [4, 8]  # two halves, twice each
    evaluated = [line["step"] for line in read_lines(runs / "gspo") if "evaluation/accuracy" in line]
    assert evaluated == [0, 4, 8]
    assert lines[-1]["train/ratio/max"] > 1.001


@pytest.mark.world
def test_the_policy_leaves_its_reference_which_stays(runs):
    distances = [line["train/kl"] for line in read_lines(runs / "kl") if "train/kl" in line]
    assert abs(distances[0]) < 1e-9 and distances[-1] > 1e-4


@pytest.mark.world
def test_rewards_that_fail_too_often_and_steps_without_a_difference_end_a_run(core, runs):
    core.world.run("tests.rl.training", 1, str(runs), json.dumps(ENDINGS), timeout=300)
    codes = {name: (runs / f"{name}.code").read_text() for name in ("failing", "flat")}
    assert codes == {"failing": "1", "flat": "1"}
    assert not (runs / "failing" / "result.json").exists()
    assert len(read_answers(runs / "flat")) == 3
    assert {line["step"] for line in read_lines(runs / "flat")} == {1, 2}  # of the warm start alone
    lines = [line for line in read_lines(runs / "tolerated") if "reward/failed" in line]
    key = "reward/failed/fail_on_some/not_a_number"
    assert {line[key] for line in lines} == {8}
    answers = [answer["reward"] for answer in read_answers(runs / "tolerated")[0]]
    assert [reward is None for reward in answers[:5]] == [True, False, False, False, True]


@pytest.mark.world
def test_a_second_run_learns_the_same_from_the_files_of_the_first(core, runs):
    case = {"overrides": {"rl.rollout.path": str(runs / "one" / "rollouts"), "rl.evaluation": "null"}}
    core.world.run("tests.rl.training", 1, str(runs), json.dumps({"replayed": case}), timeout=200)
    lines, others = read_lines(runs / "replayed"), read_lines(runs / "one")
    steps = [line for line in lines if "train/loss" in line]
    wanted = [line for line in others if "train/loss" in line]
    for line, other in zip(steps, wanted, strict=True):
        for key in SEQUENTIAL:
            assert line.get(key) == other.get(key), key
