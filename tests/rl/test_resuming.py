"""A run that is killed at any moment goes on as if it had not been."""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.command import finish, start_training
from tests.rl.training import REWARD, SMALL

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

OF_TIME = ("seconds", "per_second", "per_device", "memory/", "time", "straggler")


def build_overrides(directory: Path, steps: int) -> list[str]:
    file = directory / "reward.py"
    file.write_text(REWARD)
    values = SMALL | {"train.steps": steps, "checkpoint.interval": 2, "train.log_interval": 3}
    # Several updates learn one step's answers; the reference is that of the start, whatever was loaded.
    values |= {"rl.num_iterations": 2, "rl.loss": "{kl: 0.1, kl_kind: k3}", "rl.warm_start_steps": 0}
    return [f"{key}={value}".replace("FILE", str(file)) for key, value in values.items()]


def read(directory: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The metrics without time, and the files of answers."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    kept = [
        {key: value for key, value in line.items() if not any(part in key for part in OF_TIME)}
        for line in lines
    ]
    return kept, [path.read_text() for path in sorted((directory / "rollouts").iterdir())]


def kill_once(directory: Path, overrides: list[str], moment: float) -> bool:
    """Start the run, and kill its rank when its metrics have so many lines, and a part of a second later."""
    process = start_training("grpo-arithmetic-cpu", directory, overrides)
    metrics = directory / "metrics.jsonl"
    before = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    while process.poll() is None:
        lines = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        if lines > before + int(moment):
            time.sleep(moment % 1)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for child in children:
                for rank in Path(f"/proc/{child}/task/{child}/children").read_text().split():
                    os.kill(int(rank), signal.SIGKILL)
        time.sleep(0.02)
    process.communicate()
    return process.returncode != 0


def check_kills(directory: Path, steps: int, kills: int) -> None:
    overrides, run = build_overrides(directory, steps), directory / "run"
    finish(start_training("grpo-arithmetic-cpu", directory / "undisturbed", overrides))
    moments = random.Random(5)
    killed = 0
    while killed < kills and not (run / "result.json").exists():
        killed += kill_once(run, overrides, moments.uniform(0, 2))
    assert killed == kills
    finish(start_training("grpo-arithmetic-cpu", run, overrides))
    (lines, answers), (wanted, wanted_answers) = read(run), read(directory / "undisturbed")
    assert lines == wanted
    assert answers == wanted_answers


@pytest.mark.world
@pytest.mark.slow
def test_a_killed_run_reports_and_asks_what_an_undisturbed_one_does(tmp_path):
    check_kills(tmp_path, 14, 2)


@pytest.mark.journeys
def test_a_run_that_is_killed_twenty_times_does_too(tmp_path):
    check_kills(tmp_path, 160, 20)
