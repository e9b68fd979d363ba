"""Jobs of two nodes under a real Slurm of three, each with a fault of its own."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command import run_bundle, sets
from tests.faults.harness import (
    BY_ITSELF,
    RECIPE,
    SECONDS,
    find_processes,
    has_checkpoint,
    read_pids,
    wait_for,
)
from tests.targets import cluster
from tests.targets.test_slurm_runs import losses
from tests.training.verdicts import read_verdict

pytestmark = pytest.mark.faults
WORDS = ("launch", "slurm", "demo", *sets(*RECIPE), "--nodes=2", "--devices-per-node=1")
Bundle = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The metrics of an undisturbed job."""
    pytest.importorskip("megatron.core")
    if why := cluster.missing():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("whole")
    with cluster.cluster(tmp_path_factory.mktemp("slurm")) as environment:
        run_bundle(*WORDS, code=0, base=environment, cwd=folder, timeout=SECONDS)
    return folder / "runs/demo/metrics.jsonl"


@pytest.fixture
def environment(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables of a cluster of this test, which may lose nodes."""
    # Launchers whose ranks lost a connection need 20 s to know that a node is lost; Slurm's default is 300 s.
    with cluster.cluster(tmp_path_factory.mktemp("slurm"), timeout=40) as variables:
        yield variables


@pytest.fixture
def bundle(environment: dict[str, str], tmp_path: Path) -> Bundle:
    return lambda *words: run_bundle(*words, base=environment, cwd=tmp_path, timeout=SECONDS)


def submit(bundle: Bundle, directory: Path, *flags: str) -> str:
    """Submit the job and return its handle when it has a checkpoint."""
    submitted = bundle(*WORDS, "--detach", *flags)
    handle = submitted.stdout.strip()
    assert re.fullmatch(r"slurm:\d+", handle), submitted.stderr
    wait_for(lambda: has_checkpoint(directory))
    return handle


def find_first_verdict(directory: Path) -> dict[str, Any]:
    """Return the first verdict of a failure, which a node or the batch script wrote."""
    files = [*directory.glob("logs/node-*/*/verdict.json"), *directory.glob("logs/slurm-*/verdict-*.json")]
    verdicts = (json.loads(path.read_text()) for path in sorted(files, key=lambda path: path.stat().st_mtime))
    return next(verdict for verdict in verdicts if verdict["code"])


def wait_until_requeued_job_trains(environment: dict[str, str], handle: str, directory: Path) -> None:
    """Start a job that Slurm queues again without its delay of two minutes."""
    step = max(losses(directory))
    number = handle.removeprefix("slurm:")

    def is_training() -> bool:
        time.sleep(2)  # a job that starts in the second in which it ended has its credential revoked
        update = ["scontrol", "update", f"JobId={number}", "StartTime=now"]
        subprocess.run(update, env=environment, check=False, capture_output=True, timeout=60)
        return max(losses(directory)) > step

    wait_for(is_training)


def test_a_killed_rank_ends_the_job_and_the_same_command_goes_on(faults, whole, bundle, tmp_path):
    directory = tmp_path / "runs/demo"
    handle = submit(bundle, directory)
    (rank,) = read_pids(directory, node=1)
    os.kill(rank, signal.SIGKILL)
    assert bundle("launch", "wait", handle).returncode == 1
    processes = find_processes(tmp_path)
    verdict = read_verdict(directory)
    assert (verdict["kind"], verdict["rank"], verdict["action"]) == ("killed", 1, "restart")
    assert verdict["sentence"] in bundle("launch", "logs", handle).stdout
    assert re.search(r"after step \d+", bundle(*WORDS).stdout)
    faults.check(
        *("Slurm", "a rank is killed (SIGKILL)"),
        verdict=verdict, processes=processes,
        metrics=directory / "metrics.jsonl", whole=whole,
    )  # fmt: skip


def test_a_job_at_its_time_limit_saves_and_is_queued_again(faults, whole, bundle, environment, tmp_path):
    directory = tmp_path / "runs/demo"
    handle = submit(bundle, directory)
    number = handle.removeprefix("slurm:")
    subprocess.run(["scancel", "--signal=TERM", number], env=environment, check=True, timeout=60)
    wait_for(lambda: "PENDING" in bundle("launch", "status", handle).stdout)
    processes = find_processes(tmp_path)
    wait_until_requeued_job_trains(environment, handle, directory)
    assert bundle("launch", "wait", handle).returncode == 0
    verdict = read_verdict(directory)
    assert (verdict["kind"], verdict["code"]) == ("preempted", 75)
    faults.check(
        *("Slurm", "its time limit (SIGTERM to the tasks)"),
        verdict=verdict, processes=processes,
        metrics=directory / "metrics.jsonl", whole=whole, resumed=BY_ITSELF,
    )  # fmt: skip


def test_a_spare_node_takes_the_place_of_one_that_died(faults, whole, bundle, environment, tmp_path):
    directory = tmp_path / "runs/demo"
    handle = submit(bundle, directory, "--spares=1")
    roster = directory / "logs/roster"
    members = json.loads((roster / "round-1.json").read_text())["members"]
    lost = max(json.loads((roster / f"node-{token}.json").read_text())["name"] for token in members)
    cluster.kill(lost, environment["SLURM_CONF"])  # node1 has the batch script
    assert bundle("launch", "wait", handle).returncode == 0, bundle("launch", "logs", handle).stdout
    verdict = find_first_verdict(directory)
    assert (verdict["kind"], verdict["node"]) == ("lost node", lost)
    faults.check(
        *("Slurm, one spare node", "a node dies"),
        verdict=verdict, processes=find_processes(tmp_path),
        metrics=directory / "metrics.jsonl", whole=whole, resumed=BY_ITSELF,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lost", "number", "fault"),
    [
        ("node2", signal.SIGKILL, "a node dies"),
        ("node2", signal.SIGSTOP, "a node answers no more"),
        ("node1", signal.SIGKILL, "the node of the batch script dies"),
    ],
)
def test_slurm_queues_a_job_again_that_lost_a_node(
    faults, whole, bundle, environment, tmp_path, lost, number, fault
):
    directory = tmp_path / "runs/demo"
    handle = submit(bundle, directory)
    cluster.kill(lost, environment["SLURM_CONF"], number)
    wait_for(lambda: "PENDING" in bundle("launch", "status", handle).stdout)
    if number is signal.SIGSTOP:  # as its administrator does
        cluster.kill(lost, environment["SLURM_CONF"])
    processes = find_processes(tmp_path)
    wait_until_requeued_job_trains(environment, handle, directory)
    assert bundle("launch", "wait", handle).returncode == 0, bundle("launch", "logs", handle).stdout
    verdict = find_first_verdict(directory)
    assert (verdict["kind"], verdict["node"]) == ("lost node", lost)
    assert verdict["action"] == "restart without node"
    # Lines of the other nodes go to the log through the node of the batch script.
    assert lost == "node1" or verdict["sentence"] in bundle("launch", "logs", handle).stdout
    faults.check(
        *("Slurm", fault), verdict=verdict, processes=processes,
        metrics=directory / "metrics.jsonl", whole=whole, resumed=BY_ITSELF,
    )  # fmt: skip
