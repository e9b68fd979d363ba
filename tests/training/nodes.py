"""A job on nodes that this machine stands for: one can be killed between a checkpoint and the end."""

import os
import time
from pathlib import Path
from subprocess import Popen
from unittest.mock import patch

from tests import command
from tests.runs.numbers import learned
from tests.training.test_interruption import TINY

LONGER = (*TINY, "train.steps=30", "train.log_interval=5", "train.global_batch_size=8")


def started(directory: Path, port: int, number: int, *flags: str) -> Popen:
    """Node `number` of two, called gpu`number`."""
    with patch.dict(os.environ, {"SLURMD_NODENAME": f"gpu{number}"}):
        at = (f"--node-rank={number}", f"--rendezvous=127.0.0.1:{port}")
        return command.start_training("demo", directory, LONGER, "--nodes=2", *at, *flags)


def until_saved(directory: Path, nodes: list[Popen]) -> None:
    """Waits for the first checkpoint; a node that has ended before is an error."""
    deadline = time.monotonic() + 400
    while not (directory / "checkpoints" / "step-00000005").exists():
        ended = [node for node in nodes if node.poll() is not None]
        assert not ended and time.monotonic() < deadline, [command.finish(node) for node in ended]
        time.sleep(0.02)


def undisturbed(directory: Path, devices: int) -> list[dict[str, object]]:
    """What a job of one node learns with so many devices."""
    command.finish(command.start_training("demo", directory, LONGER, f"--devices-per-node={devices}"))
    return numbers(directory)


def numbers(directory: Path) -> list[dict[str, object]]:
    """What a run has learned."""
    return learned((directory / "metrics.jsonl").read_text())
