"""A run whose standard output nobody takes trains on, and its files hold everything."""

import json
import os

import pytest

from tests.command import start_training

pytestmark = pytest.mark.world

# One rank of a dense model, so that a run takes seconds.
ALONE = (
    "parallel.tp=1",
    "parallel.sequence_parallel=false",
    "train.steps=6",
    "train.log_interval=1",
    "train.eval_interval=2",
    "train.eval_batches=1",
    "train.global_batch_size=2",
    "train.micro_batch_size=2",
    "data.sequence_length=32",
    "model.config.num_hidden_layers=2",
    "optimizer.warmup_steps=0",
    "metrics.tensorboard=false",
)


def nobody() -> int:
    """A pipe that `head` has closed, or a `tee` that died."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def full() -> int:
    """A log on a disk without room."""
    return os.open("/dev/full", os.O_WRONLY)


def hung_up() -> int:
    """A terminal whose window was closed."""
    master, terminal = os.openpty()
    os.close(master)
    return terminal


@pytest.mark.parametrize("stream", [nobody, full, hung_up])
@pytest.mark.slow
def test_a_run_goes_on_to_its_end(stream, tmp_path):
    pytest.importorskip("megatron.core")
    directory = tmp_path / "run"
    descriptor = stream()
    streams = {"stdout": descriptor} | ({"stderr": descriptor} if stream is hung_up else {})
    ran = start_training("qwen3-tp2-sp", directory, ALONE, **streams)
    os.close(descriptor)
    _, said = ran.communicate(timeout=300)
    log = "".join(log.read_text() for log in directory.glob("logs/*/*/*/attempt_*/0/stderr.log"))
    assert ran.returncode == 0, f"{said}{log}"
    steps = [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 6 and len(steps) == 9
    assert json.loads((directory / "result.json").read_text())["step"] == 6
    assert ("standard output" in f"{said}{log}") is (stream is full)
