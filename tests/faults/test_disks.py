"""Runs whose run directory is on a disk that fails, and that go on when it is repaired."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command import finish, run_bundle, sets, start_bundle, start_training
from tests.faults.harness import RECIPE, SECONDS, find_processes, has_checkpoint, wait_for
from tests.launch.disks import (
    create_disk,
    fill,
    mount_in_namespace,
    open_mount_namespace,
    turn_read_only,
    unmount,
)
from tests.targets import cluster
from tests.targets.raycluster import Cluster
from tests.training.verdicts import find_resumed_steps

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root, and unshare"
    ),
]
FULL, READ_ONLY = "the disk of the run directory is full", "the disk of the run directory turns read-only"
UNMOUNTED = "the disk of the run directory is unmounted"
FAULTS: dict[str, tuple[Callable[[int, Path], None], str]] = {
    FULL: (fill, "0 B free"),
    READ_ONLY: (turn_read_only, "Read-only file system"),
    UNMOUNTED: (unmount, "is not mounted"),
}
NODES = ("demo", *sets(*RECIPE), "--nodes=2", "--devices-per-node=1")


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A disk of 64 MiB that is mounted nowhere, beside a local directory for temporary files."""
    (tmp_path / "local").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "local"))
    return create_disk(tmp_path, 64 << 20)


@pytest.fixture
def namespace(disk: Path) -> Iterator[int]:
    """A process in whose mount namespace the disk is mounted."""
    with open_mount_namespace() as pid:
        mount_in_namespace(pid, disk)
        yield pid


def see_in_namespace(pid: int, path: Path) -> Path:
    """Return a path as another mount namespace has it."""
    return Path(f"/proc/{pid}/root", *path.parts[1:])


def check_verdicts(directory: Path, local: Path, disk: Path, cause: str) -> dict[str, Any]:
    """Check the verdicts of all nodes; return the first with that cause.

    A launcher writes its verdict into the directory `local` where it cannot write to the disk.
    """
    places = (*directory.glob("logs/node-*/1"), *local.glob("mcore-bundle-*"))
    verdicts = [json.loads(path.read_text()) for place in places for path in place.glob("verdict.json")]
    for verdict in verdicts:
        assert (verdict["kind"], verdict["action"], verdict["code"]) == ("disk", "stop", 1)
        assert str(disk) in verdict["cause"]
    return next(verdict for verdict in verdicts if cause in verdict["cause"])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_goes_on_when_its_disk_is_repaired(faults, whole, namespace, disk, tmp_path, fault):
    inject, cause = FAULTS[fault]
    within = ("nsenter", f"--mount=/proc/{namespace}/ns/mnt")
    directory = see_in_namespace(namespace, disk / "run")
    process = start_training("demo", disk / "run", RECIPE, within=within)
    wait_for(lambda: has_checkpoint(directory), process)
    inject(namespace, disk)
    printed = finish(process, 1, SECONDS)
    processes = find_processes(tmp_path)
    verdict = check_verdicts(directory, tmp_path / "local", disk, cause)
    assert verdict["sentence"] in printed
    mount_in_namespace(namespace, disk)
    resumed = start_training("demo", disk / "run", RECIPE, within=within)
    assert find_resumed_steps(finish(resumed, timeout=SECONDS))
    faults.check(
        *("local", fault), verdict=verdict, processes=processes,
        metrics=directory / "metrics.jsonl", whole=whole,
    )  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_job_of_slurm_goes_on_when_its_disk_is_repaired(
    faults, whole, namespace, disk, tmp_path, tmp_path_factory, fault
):
    if why := cluster.missing():
        pytest.skip(why)
    inject, cause = FAULTS[fault]
    within = ("nsenter", f"--mount=/proc/{namespace}/ns/mnt")
    directory = see_in_namespace(namespace, disk / "runs/demo")
    with cluster.cluster(tmp_path_factory.mktemp("slurm"), within=within) as environment:

        def bundle(*words: str) -> subprocess.CompletedProcess[str]:
            here = (*within, f"--wdns={disk}")
            return run_bundle(*words, base=environment, within=here, timeout=SECONDS)

        submitted = bundle("launch", "slurm", *NODES, "--detach")
        handle = submitted.stdout.strip()
        assert re.fullmatch(r"slurm:\d+", handle), submitted.stderr
        wait_for(lambda: has_checkpoint(directory))
        inject(namespace, disk)
        assert bundle("launch", "wait", handle).returncode == 1
        processes = find_processes(tmp_path)
        verdict = check_verdicts(directory, tmp_path / "local", disk, cause)
        mount_in_namespace(namespace, disk)
        assert re.search(r"after step \d+", bundle("launch", "slurm", *NODES).stdout)
        faults.check(
            *("Slurm", fault), verdict=verdict, processes=processes,
            metrics=directory / "metrics.jsonl", whole=whole,
        )  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_job_on_ray_goes_on_when_its_disk_is_repaired(
    faults, whole, ray_cluster: Cluster, disk, tmp_path, fault
):
    inject, cause = FAULTS[fault]
    directory = see_in_namespace(ray_cluster.first, disk / "runs/demo")

    def start() -> subprocess.Popen[str]:
        within = ray_cluster.command(disk)
        return start_bundle("launch", "ray", *NODES, within=within, base=ray_cluster.environment)

    mount_in_namespace(ray_cluster.first, disk)
    driver = start()
    wait_for(lambda: has_checkpoint(directory), driver)
    inject(ray_cluster.first, disk)
    printed = finish(driver, 1, SECONDS)
    processes = find_processes(tmp_path)
    verdict = check_verdicts(directory, ray_cluster.root, disk, cause)
    assert verdict["sentence"] in printed
    for place in ray_cluster.root.glob("mcore-bundle-*"):
        shutil.rmtree(place)
    mount_in_namespace(ray_cluster.first, disk)
    assert find_resumed_steps(finish(start(), timeout=SECONDS))
    faults.check(
        *("Ray", fault), verdict=verdict, processes=processes,
        metrics=directory / "metrics.jsonl", whole=whole,
    )  # fmt: skip
