"""A run that is interrupted ends as it should, and goes on as if it had not been."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bundle.launch import hang, outcomes
from bundle.planning.size import compute_model_size
from bundle.recipe import load
from tests import command
from tests.command import finish
from tests.launch.launched import gone
from tests.runs.numbers import learned
from tests.training.verdicts import find_resumed_steps, read_verdict

pytestmark = pytest.mark.world

TINY = (
    "train.steps=12",
    "optimizer.warmup_steps=2",
    "train.eval_batches=1",
    "train.eval_interval=0",
    "train.log_interval=4",
    "train.global_batch_size=4",
    "train.micro_batch_size=2",
    "data.sequence_length=32",
    "model.config.num_hidden_layers=2",
    "model.config.hidden_size=32",
    "checkpoint.interval=5",
    "metrics.tensorboard=false",
)


def train(directory: Path, *flags: str) -> subprocess.Popen:
    return command.start_training("demo", directory, TINY, *flags)


def pids(directory: Path) -> list[int]:
    return [outcome.pid for outcome in outcomes.read(directory / "logs" / "node-0" / "1")]


def wait_for(process: subprocess.Popen, happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not happened():
        assert process.poll() is None and time.monotonic() < deadline, finish(process, 0)
        time.sleep(0.01)


def wait_for_checkpoint(process: subprocess.Popen, directory: Path) -> None:
    wait_for(process, (directory / "checkpoints" / "step-00000005").exists)


def stopped_at(said: str) -> int:
    """The step of the checkpoint that a run says it has written."""
    steps = re.findall(r"at step (\d+)", said)  # the first is where training starts
    assert len(steps) > 1, said
    return int(steps[-1])


def numbers(directory: Path) -> list[dict[str, Any]]:
    """What the metrics say about learning."""
    return learned((directory / "metrics.jsonl").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("megatron.core")
    directory = tmp_path_factory.mktemp("whole") / "run"
    finish(train(directory), 0)
    return directory


BACKGROUND = ("--set", "checkpoint.async=true")


@pytest.mark.parametrize(("rank", "flags"), [(0, ()), pytest.param(1, BACKGROUND, marks=pytest.mark.slow)])
def test_a_run_killed_at_any_rank_goes_on_to_the_same_numbers(whole, tmp_path, rank, flags):
    directory = tmp_path / "run"
    process = train(directory, *flags)
    wait_for_checkpoint(process, directory)
    ranks = pids(directory)
    os.kill(ranks[rank], signal.SIGKILL)
    said = finish(process, 1)
    verdict = read_verdict(directory)
    assert (verdict["kind"], verdict["rank"], verdict["action"]) == ("killed", rank, "restart")
    assert verdict["sentence"] in said
    assert gone(ranks)
    assert find_resumed_steps(finish(train(directory, *flags), 0))
    assert numbers(directory) == numbers(whole)


@pytest.mark.slow
def test_a_launch_starts_its_ranks_again_where_that_may_mend_it_and_goes_on(whole, tmp_path):
    directory = tmp_path / "run"
    process = train(directory, "--restarts=1", "--fresh")
    wait_for_checkpoint(process, directory)
    os.kill(pids(directory)[1], signal.SIGKILL)
    said = finish(process, 0)
    verdict = read_verdict(directory)
    assert (verdict["kind"], verdict["rank"]) == ("killed", 1)
    assert verdict["sentence"] in said and "restarts left: 0" in said
    assert find_resumed_steps(said)  # although it was to begin anew
    assert numbers(directory) == numbers(whole)


def stop_a_writer(rank: int) -> list[int]:
    """The processes that a rank has forked, one of which is kept from going on; none where it has none."""
    pids = [int(word) for word in Path(f"/proc/{rank}/task/{rank}/children").read_text().split()]
    with suppress(ProcessLookupError, FileNotFoundError):  # it may be done by now
        if any(holds_the_lock(pid) for pid in pids):  # it has only just been forked, and is bound in a moment
            return []
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        return pids
    return []


def holds_the_lock(pid: int) -> bool:
    """Whether a process still has the file that a run directory is locked by, which it lets go of at last."""
    return any(file.readlink().name == ".lock" for file in Path(f"/proc/{pid}/fd").iterdir())


@pytest.mark.parametrize("flags", [(), BACKGROUND], ids=["", "written in the background"])
@pytest.mark.slow
def test_a_rank_that_is_killed_with_a_writer_of_its_own_leaves_the_run_to_the_next(whole, tmp_path, flags):
    directory = tmp_path / "run"
    process = train(directory, "--restarts=1", "--set", "checkpoint.interval=1", *flags)
    wait_for(process, (directory / "checkpoints" / "step-00000001").exists)
    first, second = pids(directory)
    writers: list[int] = []

    def writes() -> bool:
        writers.extend(stop_a_writer(first))
        return bool(writers)

    wait_for(process, writes)
    os.kill(first, signal.SIGKILL)
    assert gone([first, second, *writers], 30)
    said = finish(process, 0)
    verdict = read_verdict(directory)
    assert (verdict["kind"], verdict["rank"]) == ("killed", 0)
    assert verdict["sentence"] in said and find_resumed_steps(said)
    assert numbers(directory) == numbers(whole)


@pytest.mark.parametrize(
    "flags",
    [pytest.param((), id=""), pytest.param(BACKGROUND, id="background", marks=pytest.mark.slow)],
)
def test_sigterm_saves_ends_with_75_and_the_same_command_goes_on(whole, tmp_path, flags):
    directory = tmp_path / "run"
    process = train(directory, *flags)
    wait_for_checkpoint(process, directory)
    process.send_signal(signal.SIGTERM)
    step = stopped_at(finish(process, 75))
    assert find_resumed_steps(finish(train(directory, *flags), 0)) == [step]
    assert numbers(directory) == numbers(whole)


def test_a_finished_run_is_not_overwritten(whole):
    before = numbers(whole)
    assert "--fresh overwrites it" in finish(train(whole), 2)
    assert numbers(whole) == before


@pytest.mark.slow
def test_resuming_a_finished_run_keeps_its_result_and_more_steps_make_it_longer(whole, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(whole, directory)
    result = (directory / "result.json").read_bytes()
    assert "train.steps" in finish(train(directory, "--resume"), 0)
    assert (directory / "result.json").read_bytes() == result
    longer = ("--set", "train.steps=16", "--set", "optimizer.min_lr=1e-4")
    more = ("--resume", "--set", "train.steps=16", "--set", "train.log_interval=1")
    assert find_resumed_steps(finish(train(directory, *more), 0)) == [12]
    assert json.loads((directory / "result.json").read_text())["step"] == 16
    assert numbers(directory)[: len(numbers(whole))] == numbers(whole)
    # The schedule is that of the new length: the rate of step 13 is above the lowest, and goes on falling.
    trained = [line for line in numbers(directory) if line["step"] > 12 and "train/loss" in line]
    rates = [line["train/learning_rate"] for line in trained]
    assert rates == sorted(rates, reverse=True) and rates[0] > 2 * rates[3]
    assert "another recipe" in finish(train(directory, "--resume", *longer), 2)


@pytest.mark.slow
def test_a_run_begins_with_another_runs_newest_checkpoint_once(whole, tmp_path):
    directory = tmp_path / "run"
    begins = ("--from", str(whole), "--set")
    assert find_resumed_steps(finish(train(directory, *begins, "train.steps=14"), 0)) == [12]
    assert [line["step"] for line in numbers(directory)] == [14, 14]
    # The same command, as a scheduler gives it again, goes on with the run's own.
    said = finish(train(directory, *begins, "train.steps=15", "--resume"), 0)
    assert find_resumed_steps(said) == [14]
    said = finish(train(directory, "--from", "/else", "--set", "train.steps=16", "--resume"), 2)
    assert str(whole) in said and "/else" in said


def test_a_missing_checkpoint_is_told_before_any_rank_starts(tmp_path):
    said = finish(train(tmp_path / "run", "--from", "/nonexistent"), 2)
    assert "--from /nonexistent: this checkpoint does not exist" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_whose_updates_were_all_skipped_has_failed(tmp_path):
    directory = tmp_path / "run"
    broken = ("--set", "model.mtp.loss_scale=1e300", "--set", "train.on_nan=skip")
    assert "12 updates" in finish(train(directory, *broken), 1)
    assert not (directory / "result.json").exists()
    written = (directory / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in written]
    assert lines[0]["train/skipped_updates"] == 4
    assert lines[0]["train/grad_norm"] is None
    # Of both replicas: a global batch of rows in each step.
    a_step = lines[0]["train/tokens_per_second"] * lines[0]["train/step_seconds"]
    assert a_step == pytest.approx(4 * 32)
    # Each of the two ranks has half of its arithmetic.
    recipe = load("demo", TINY)
    a_rank = compute_model_size(recipe.architecture, recipe.model).count_training_flops([32] * 4) / 2
    flops = lines[0]["train/tflops_per_device"] * 1e12 * lines[0]["train/step_seconds"]
    assert flops == pytest.approx(a_rank)


@pytest.mark.slow
def test_a_run_that_an_early_stop_has_ended_is_finished_until_that_is_changed(tmp_path):
    directory = tmp_path / "run"
    rule = ("--set", "train.early_stop={patience: 2, min_delta: 100}", "--set", "train.eval_interval=2")
    assert "train.early_stop" in finish(train(directory, *rule), 0)
    result = json.loads((directory / "result.json").read_text())
    assert result["step"] == 6 and "in 2 evaluations" in result["ended"]
    assert "train.early_stop" in finish(train(directory, *rule), 2)
    more = ("--resume", *rule[2:], "--set", "train.early_stop={patience: 3, min_delta: 100}")
    finish(train(directory, *more), 0)
    assert json.loads((directory / "result.json").read_text())["step"] == 8


@pytest.mark.slow
def test_a_stopped_rank_is_a_hang_that_names_it(tmp_path):
    """Real ranks, whose loading and saving had a patience of an hour before."""
    directory = tmp_path / "run"
    limits = ("--set", "distributed.timeout_seconds=25", "--set", "checkpoint.interval=0")
    process = train(directory, *limits, "--set", "train.log_interval=1", "--set", "train.steps=100000")
    wait_for(process, lambda: (directory / "metrics.jsonl").exists() and len(numbers(directory)) > 1)
    ranks = pids(directory)
    os.kill(ranks[1], signal.SIGSTOP)
    said = finish(process, 6)
    verdict = read_verdict(directory)
    assert said.splitlines()[-1].endswith(verdict["sentence"])
    assert (verdict["kind"], verdict["rank"], verdict["action"]) == ("hang", 1, "restart")
    (world,) = (directory / "logs").glob("world-*")
    waiting, stopped = hang.read(world)
    assert waiting.waits is not None and re.fullmatch(r"step \d+", waiting.doing)
    assert re.fullmatch(r"`\w+` \((?!typing)\w+\.py:\d+\)", waiting.frame)
    assert "SIGSTOP" in stopped.silent
    assert (world / "hang-rank-0.txt").exists()
    assert gone(ranks)
