"""Jobs of two nodes on a real Ray of two machines, each with a fault of its own."""

import fcntl
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pytest

from bundle.launch import job as job_file
from bundle.targets import kubernetes
from bundle.targets.images import HOME
from bundle.targets.kubernetes.options import KubernetesOptions
from bundle.targets.kubernetes.pod import JOB_MOUNT_DIRECTORY
from tests.command import finish, sets, start_bundle
from tests.faults.harness import (
    RECIPE,
    SECONDS,
    find_processes,
    find_verdict,
    has_checkpoint,
    read_pids,
    wait_for,
)
from tests.targets.raycluster import Cluster
from tests.training.verdicts import find_resumed_steps, read_verdict

pytestmark = pytest.mark.faults
JOB = ("demo", *sets(*RECIPE), "--nodes=2", "--devices-per-node=1")
WORDS = ("launch", "ray", *JOB)
Start = Callable[..., Popen[str]]


@pytest.fixture(scope="module")
def whole(ray_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The metrics of an undisturbed job."""
    folder = tmp_path_factory.mktemp("whole")
    within = ray_cluster.command(folder)
    finish(start_bundle(*WORDS, within=within, base=ray_cluster.environment, cwd=folder), timeout=SECONDS)
    return folder / "runs/demo/metrics.jsonl"


@pytest.fixture
def start(ray_cluster: Cluster, whole: Path, tmp_path: Path) -> Start:
    """Start a command in the cluster."""
    within, environment = ray_cluster.command(tmp_path), ray_cluster.environment
    return lambda *words: start_bundle(*words, within=within, base=environment, cwd=tmp_path)


def is_unlocked(directory: Path) -> bool:
    """Return whether no rank has the run directory any more."""
    with (directory / ".lock").open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_a_killed_rank_ends_the_driver_and_the_same_command_goes_on(
    faults, whole, start, ray_cluster, tmp_path
):
    directory = tmp_path / "runs/demo"
    driver = start(*WORDS)
    wait_for(lambda: has_checkpoint(directory), driver)
    (rank,) = read_pids(directory, node=1)  # as it is called among the processes of the cluster
    subprocess.run(ray_cluster.command(tmp_path, "kill", "-KILL", str(rank)), check=True, timeout=60)
    finish(driver, 1, SECONDS)
    processes = find_processes(tmp_path)
    verdict = read_verdict(directory)
    assert (verdict["kind"], verdict["rank"], verdict["action"]) == ("killed", 1, "restart")
    assert find_resumed_steps(finish(start(*WORDS), timeout=SECONDS))
    faults.check(
        *("Ray", "a rank is killed (SIGKILL)"),
        verdict=verdict, processes=processes,
        metrics=directory / "metrics.jsonl", whole=whole,
    )  # fmt: skip


def test_the_ranks_of_a_killed_driver_end_and_the_same_command_goes_on(faults, whole, start, tmp_path):
    directory = tmp_path / "runs/demo"
    driver = start(*WORDS)
    wait_for(lambda: has_checkpoint(directory), driver)
    inside = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
    os.kill(int(inside[0]), signal.SIGKILL)  # nsenter only waits for it
    finish(driver, -signal.SIGKILL, SECONDS)
    processes = find_processes(tmp_path, 60)
    wait_for(lambda: is_unlocked(directory))
    assert find_resumed_steps(finish(start(*WORDS), timeout=SECONDS))
    faults.check(
        *("Ray", "the driver is killed"),
        verdict=find_verdict(directory), processes=processes,
        metrics=directory / "metrics.jsonl", whole=whole,
    )  # fmt: skip


def test_a_rayjob_goes_on_where_the_head_is_lost(faults, whole, start, ray_cluster, tmp_path):
    directory = tmp_path / "runs/demo"
    finish(start("plan", *JOB, "--job=job.json"))
    job = job_file.load(tmp_path / "job.json")
    rayjob = kubernetes.build_objects(job, KubernetesOptions(image="bundle", claim="runs", form="rayjob"))[-1]
    # What KubeRay runs on the head that it makes, and on the next one that it makes where that is lost.
    entrypoint = (
        rayjob["spec"]["entrypoint"].replace(HOME, str(tmp_path)).replace(JOB_MOUNT_DIRECTORY, str(tmp_path))
    )
    words = shlex.split(entrypoint)
    words = words[words.index("launch") :]
    driver = start(*words)
    wait_for(lambda: has_checkpoint(directory), driver)
    ray_cluster.lose_head()
    finish(driver, -signal.SIGKILL, SECONDS)
    processes = find_processes(tmp_path, 60)
    ray_cluster.begin_again()
    for _ in range(rayjob["spec"]["backoffLimit"]):  # the other machine's ranks may still end
        driver = start(*words)
        said, _ = driver.communicate(timeout=SECONDS)
        if driver.returncode == 0:
            break
    assert driver.returncode == 0 and re.search(r"after step \d+", said), said
    faults.check(
        *("Ray, a RayJob", "the head and all that runs on its machine are killed"),
        verdict=find_verdict(directory), processes=processes,
        metrics=directory / "metrics.jsonl", whole=whole,
    )  # fmt: skip
