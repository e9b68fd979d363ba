"""Nodes of a job that start again in place together, though the ranks of one notice nothing."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from bundle.launch import outcomes
from tests.launch.launched import reserved
from tests.training import command
from tests.training.command import finish
from tests.training.test_interruption import TINY
from tests.training.test_spares import numbers

pytestmark = pytest.mark.releases
# Long enough that a rank can be killed between a checkpoint and the end.
LONGER = (*TINY, "train.steps=30", "train.log_interval=5", "train.global_batch_size=8")


def started(directory: Path, port: int, number: int) -> subprocess.Popen:
    """One of two nodes of one rank each."""
    os.environ["SLURMD_NODENAME"] = f"gpu{number}"
    return command.train(
        "demo",
        directory,
        LONGER,
        *("--nodes=2", "--restarts=3", f"--node-rank={number}", "--devices-per-node=1"),
        f"--rendezvous=127.0.0.1:{port}",
    )


def test_the_node_that_broke_waits_for_the_one_that_did_not_notice_and_both_meet_anew(tmp_path):
    pytest.importorskip("megatron.core")
    run = tmp_path / "run"
    with reserved() as port:
        nodes = [started(run, port, number) for number in range(2)]
        deadline = time.monotonic() + 400
        while not (run / "checkpoints" / "step-00000005").exists():
            ended = [node for node in nodes if node.poll() is not None]
            assert not ended and time.monotonic() < deadline, [finish(node) for node in ended]
            time.sleep(0.02)
        (first,), (second,) = (outcomes.read(run / f"logs/node-{number}/1") for number in range(2))
        os.kill(first.pid, signal.SIGSTOP)  # which serves the store
        os.kill(second.pid, signal.SIGKILL)
        said = [finish(node) for node in nodes]
    assert all("rank 1 on gpu1: killed by SIGKILL" in text for text in said)
    assert "goes on after step " in said[0]
    assert len(list((run / "logs").glob("world-*"))) == 2
    assert {path.name for path in (run / "logs").glob("node-*/*")} == {"1", "2"}
    finish(command.train("demo", tmp_path / "whole", LONGER, "--devices-per-node=2"))
    assert numbers(run) == numbers(tmp_path / "whole")
    assert numbers(run)[-1]["step"] == 30
