"""A job that loses a node and goes on with one that was spare."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from bundle.launch import outcomes
from tests.launch.launched import gone, reserved
from tests.runs.numbers import learned
from tests.training import command
from tests.training.command import finish
from tests.training.test_interruption import TINY

pytestmark = pytest.mark.releases
# Long enough that a node can be killed between a checkpoint and the end.
LONGER = (*TINY, "train.steps=30", "train.log_interval=5", "train.global_batch_size=8")


def started(directory: Path, port: int, number: int) -> subprocess.Popen:
    """One of three nodes of two ranks each, for a job of two."""
    os.environ["SLURMD_NODENAME"] = f"gpu{number}"
    return command.train(
        "demo",
        directory,
        LONGER,
        *("--nodes=2", "--spares=1", f"--node-rank={number}", "--devices-per-node=2"),
        f"--rendezvous=127.0.0.1:{port}",
    )


def numbers(directory: Path) -> list[dict[str, object]]:
    return learned((directory / "metrics.jsonl").read_text())


def test_a_node_is_killed_and_the_job_goes_on_without_it_to_the_losses_of_an_undisturbed_run(tmp_path):
    pytest.importorskip("megatron.core")
    run = tmp_path / "run"
    with reserved() as port:
        nodes = [started(run, port, number) for number in range(3)]
        deadline = time.monotonic() + 400
        while not (run / "checkpoints" / "step-00000005").exists():
            ended = [node for node in nodes if node.poll() is not None]
            assert not ended and time.monotonic() < deadline, [finish(node) for node in ended]
            time.sleep(0.02)
        entries = [json.loads(path.read_text()) for path in (run / "logs/roster").glob("node-*.json")]
        numbered = {entry["token"]: entry["number"] for entry in entries}
        first, second = (
            numbered[token] for token in json.loads((run / "logs/roster/round-1.json").read_text())["members"]
        )
        # Where rank 0 is, which serves the store, writes the metrics and holds the run directory.
        nodes[first].kill()
        nodes[first].communicate()
        assert gone([each.pid for each in outcomes.read(run / "logs/node-0/1")])
        (spare,) = set(range(3)) - {first, second}
        said = {number: finish(nodes[number]) for number in (second, spare)}
    lost = (
        f"gpu{first}: lost, and all that ran there: no word from it within 20 s after the others ended;"
        f" restart without gpu{first}"
    )
    assert lost in said[second] and lost not in said[spare]
    assert sum("goes on after step " in text for text in said.values()) == 1
    finish(command.train("demo", tmp_path / "whole", LONGER, "--devices-per-node=4"))
    assert numbers(run) == numbers(tmp_path / "whole")
    assert numbers(run)[-1]["step"] == 30
