"""Jobs on a real Ray of two machines."""

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bundle.launch import job as job_file
from bundle.targets.ray import STOP_NAME
from tests.command import run_bundle, start_bundle
from tests.targets import raycluster
from tests.targets.raycluster import Cluster
from tests.targets.test_slurm_runs import RECIPE, losses

pytestmark = pytest.mark.clusters
TWO = ("--nodes=2", "--devices-per-node=1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    pytest.importorskip("megatron.core")
    if why := raycluster.missing():
        pytest.skip(why)
    with raycluster.cluster(tmp_path_factory.mktemp("ray")) as made:
        yield made


@pytest.fixture
def bundle(cluster: Cluster, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    def start(*words: str) -> subprocess.Popen[str]:
        return start_bundle(*words, within=cluster.command(tmp_path), base=cluster.environment, cwd=tmp_path)

    return start


def ended(process: subprocess.Popen[str], code: int) -> tuple[str, str]:
    out, err = process.communicate(timeout=900)
    assert process.returncode == code, out + err
    return out, err


def until(condition: Callable[[], object], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_two_machines_train_what_one_trains_and_the_driver_ends_as_they_do(bundle, tmp_path):
    said, _ = ended(bundle("launch", "ray", *RECIPE, *TWO, "--preflight"), 0)
    passing = tmp_path / "runs/demo/logs/preflight/passing.txt"
    assert len(passing.read_text().splitlines()) == 2
    assert re.search(r"^\[0/0\] .*step 6/6", said, re.MULTILINE), said
    executed = json.loads((tmp_path / "runs/demo/job.json").read_text())
    assert (executed["nodes"], executed["per_node"]) == (2, 1)
    ended(bundle("train", *RECIPE, "--run-directory=alone"), 0)
    assert losses(tmp_path / "runs/demo") == pytest.approx(losses(tmp_path / "alone"), rel=1e-6)
    # Once more: a run that is finished is none to go on with, and no machine is asked for.
    assert "--fresh" in ended(bundle("launch", "ray", *RECIPE, *TWO), 2)[1]


def test_a_job_is_submitted_stopped_and_goes_on(bundle, cluster, tmp_path):
    long = (*RECIPE, "--set=train.steps=5000", *TWO, f"--address={cluster.address}", "--detach")
    handle, run = ended(bundle("launch", "ray", *long), 0)[0].strip(), tmp_path / "runs/demo"
    assert re.fullmatch(rf"ray:raysubmit_\w+@{cluster.address}", handle)
    until(lambda: (run / "metrics.jsonl").exists() and len(losses(run)) > 2)
    assert ended(bundle("launch", "status", handle), 0)[0] == f"{handle} RUNNING\n"
    assert f"{handle}  RUNNING  {run}" in ended(bundle("launch", "list"), 0)[0].splitlines()
    ended(bundle("launch", "stop", handle), 0)
    ended(bundle("launch", "wait", handle), 75)
    assert handle not in ended(bundle("launch", "list"), 0)[0]
    assert "[0/0] " in ended(bundle("launch", "logs", handle), 0)[0]
    first = max(losses(run))
    again = ended(bundle("launch", "ray", *long), 0)[0].strip()
    until(lambda: max(losses(run)) > first)
    ended(bundle("launch", "stop", again), 0)
    ended(bundle("launch", "wait", again), 75)
    assert sorted(losses(run)) == list(range(1, max(losses(run)) + 1))


def test_machines_that_are_not_there_are_said_and_a_job_that_waits_for_them_is_stopped(bundle, tmp_path):
    four = (*RECIPE, "--set=train.global_batch_size=16", "--nodes=4", "--devices-per-node=1")
    _, err = ended(bundle("launch", "ray", *four, "--wait=3"), 5)
    assert "4, with 1 CPU each" in err and "1 CPU; 1 CPU" in err
    (folder,) = (tmp_path / "runs/demo/logs").glob("ray-*")
    (folder / job_file.FILE_NAME).unlink()
    driver = bundle("launch", "ray", *four, "--restarts=2")
    until(lambda: (folder / job_file.FILE_NAME).exists())
    (folder / STOP_NAME).touch()  # as `launch stop` does
    assert ended(driver, 143)[1].splitlines()[-1].startswith("mcore-bundle: ")


def test_without_its_token_a_cluster_takes_nobody(cluster, tmp_path):
    (tmp_path / "token").write_text("0" * 64)
    run_bundle(
        *("launch", "status", f"ray:x@{cluster.address}"),
        within=cluster.command(tmp_path),
        base=cluster.environment,
        environment={"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")},
        cwd=tmp_path,
        code=5,
    )
