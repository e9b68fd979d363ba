"""`launch list`: the jobs of every target; a local job and clients of schedulers are real processes."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bundle.errors import TargetUnavailable
from bundle.targets import docker, local, ray, slurm
from bundle.targets.kubernetes import client
from bundle.targets.local import LocalOptions
from bundle.targets.states import ListedJob, TargetNotConfigured
from tests.command import capture_bundle, run_bundle
from tests.targets.test_docker import decided
from tests.targets.test_slurm_asked import clients


@pytest.fixture
def running(tmp_path: Path) -> Iterator[str]:
    """The folder of a node that runs, far from `runs` of any working directory."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 120\n")
    program.chmod(0o755)
    job = replace(decided("cpu", "cpu", 1, 2), directory=tmp_path / "it's elsewhere")
    folder = local.submit(job, LocalOptions(python=str(program)), tmp_path)
    group = int(Path(folder, "group").read_text().split()[0])
    yield folder
    os.killpg(group, signal.SIGKILL)


def list_own(folder: Path) -> list[ListedJob]:
    """The local jobs below a folder; other people of this machine may have others."""
    return [job for job in local.list_jobs() if job.directory.is_relative_to(folder)]


def test_a_node_that_runs_anywhere_and_the_ended_ones_of_this_directory_are_listed(
    running, tmp_path, monkeypatch
):
    job = replace(decided("cpu", "cpu", 1, 2), directory=tmp_path / "runs/demo")
    ended = local.submit(job, LocalOptions(python="/bin/false"), tmp_path)
    assert local.wait(ended) == 1
    (tmp_path / "runs/demo/logs/local-notes").mkdir()  # not a job
    monkeypatch.chdir(tmp_path)
    assert sorted(list_own(tmp_path)) == sorted(
        [
            ListedJob(running, "RUNNING", False, tmp_path / "it's elsewhere"),
            ListedJob(ended, "FAILED", True, tmp_path / "runs/demo"),
        ]
    )
    os.killpg(int(Path(running, "group").read_text().split()[0]), signal.SIGKILL)
    deadline = time.monotonic() + 30
    while running in [each.name for each in list_own(tmp_path)]:  # nobody remembers it but its folder
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_jobs_of_another_user_are_not_listed(running, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("not root: there is no other user")
    forked = os.fork()  # an interpreter of root's may not be another's to start
    if forked == 0:
        os.setuid(10001)
        os._exit(Path(running) in local._find_running_folders())
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    assert Path(running) in local._find_running_folders()


def test_slurm_lists_our_jobs_of_this_user(tmp_path, monkeypatch):
    rows = [
        "7|RUNNING|/data/a | b/logs/slurm-01ab/job.sh",
        "8|CANCELLED|/data/runs/demo/logs/slurm-01ab/job.sh",
        "9|RUNNING|/home/me/job.sh",
        "10|RUNNING|(null)",
        "11|RUNNING|/data/runs/demo/logs/slurm-01ab/other.sh",
    ]
    (tmp_path / "rows").write_text("\n".join(rows) + "\n")
    clients(tmp_path / "bin", monkeypatch, squeue=f'echo "$@" >{tmp_path}/asked; cat {tmp_path}/rows')
    assert list(slurm.list_jobs()) == [
        ListedJob("7", "RUNNING", False, Path("/data/a | b")),
        ListedJob("8", "CANCELLED", True, Path("/data/runs/demo")),
    ]
    assert f"--user={os.getuid()}" in (tmp_path / "asked").read_text().split()


def test_docker_lists_the_containers_of_this_user(tmp_path, monkeypatch):
    job = replace(decided("cpu", "cpu", 1, 2), directory=tmp_path / "a | b")
    words = docker.build_node_command(job, docker.DockerOptions("bundle"), tmp_path).argv
    labels = dict(
        word.removeprefix("--label=").split("=", 1) for word in words if word.startswith("--label=")
    )
    owner, directory = labels
    assert labels == {owner: str(os.getuid()), directory: str(job.directory)}
    (tmp_path / "rows").write_text(f"one|running|{job.directory}\ntwo|exited|{job.directory}\n")
    clients(tmp_path / "bin", monkeypatch, docker=f'echo "$@" >{tmp_path}/asked; cat {tmp_path}/rows')
    assert list(docker.list_jobs()) == [
        ListedJob("one", "RUNNING", False, job.directory),
        ListedJob("two", "EXITED", True, job.directory),
    ]
    asked = (tmp_path / "asked").read_text()
    assert f"--filter=label={owner}={os.getuid()}" in asked.split()
    assert f'{{{{.Label "{directory}"}}}}' in asked


def test_ray_lists_our_jobs_of_the_cluster_that_its_variable_names(monkeypatch):
    def describe(number: str | None, name: str, folder: str | None) -> SimpleNamespace:
        metadata = folder and {"folder": folder}
        status = SimpleNamespace(value=name)
        return SimpleNamespace(
            submission_id=number, status=status, metadata=metadata, driver_exit_code=None, message=""
        )

    known = [
        describe("raysubmit_1", "RUNNING", "/runs/demo/logs/ray-01ab"),
        describe("raysubmit_2", "SUCCEEDED", "/runs/demo/logs/ray-01ab"),
        describe("raysubmit_3", "RUNNING", None),
        describe(None, "RUNNING", "/runs/demo/logs/ray-01ab"),
    ]
    monkeypatch.setattr(
        ray,
        "_connect",
        lambda address: SimpleNamespace(list_jobs=lambda: known, get_address=lambda: address),
    )
    for variable, address in (("", "http://127.0.0.1:8265"), ("http://head:1", "http://head:1")):
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", variable)
        assert list(ray.list_jobs()) == [
            ListedJob(f"raysubmit_1@{address}", "RUNNING", False, Path("/runs/demo")),
            ListedJob(f"raysubmit_2@{address}", "SUCCEEDED", True, Path("/runs/demo")),
        ]


def test_a_dashboard_that_is_not_there_is_an_error_only_where_somebody_names_it(monkeypatch):
    def refuse(address: str) -> None:
        raise TargetUnavailable(f"no answer from {address}")

    monkeypatch.setattr(ray, "_connect", refuse)
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    with pytest.raises(TargetNotConfigured, match=r"127\.0\.0\.1"):
        list(ray.list_jobs())
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://head:1")
    with pytest.raises(TargetUnavailable, match="head") as error:
        list(ray.list_jobs())
    assert not isinstance(error.value, TargetNotConfigured)


def test_threads_import_the_clients_of_targets_one_after_the_other(tmp_path, monkeypatch):
    """Both clients import the modules of requests, of which two threads at once may get a half."""
    busy = (
        "import pathlib, time\nmark = pathlib.Path(__file__).parents[1] / 'busy'\nmark.touch(0o600, False)\n"
    )
    for name in ("ray", "kubernetes"):
        (tmp_path / name).mkdir()
        text = busy + "time.sleep(0.3)\nmark.unlink()\nraise ImportError('as if it were not installed')\n"
        (tmp_path / name / "__init__.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    client._connect.cache_clear()
    with ThreadPoolExecutor() as threads:
        imports = [threads.submit(ray.import_ray), threads.submit(client._connect)]
        errors = [each.exception() for each in imports]
    assert [type(error) for error in errors] == [TargetNotConfigured] * 2


def answer(jobs: list[ListedJob] | Exception) -> SimpleNamespace:
    """A target whose list is a value or an error."""

    def list_jobs() -> list[ListedJob]:
        if isinstance(jobs, Exception):
            raise jobs
        return jobs

    return SimpleNamespace(list_jobs=list_jobs)


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [
        ListedJob("7", "RUNNING", False, Path("/runs/demo")),
        ListedJob("12", "FAILED", True, Path("/runs/a\nb")),
    ]
    made = {
        "slurm": answer(jobs),
        "ray": answer(TargetNotConfigured("no ray")),
        "docker": answer(TargetUnavailable("no daemon")),
        "local": answer([]),
    }
    table = {name: (target, "") for name, target in made.items()}
    monkeypatch.setattr("bundle.cli.launch.listing.TARGETS_WITH_JOB_ID_PATTERNS", table)


def test_a_target_that_cannot_be_reached_is_a_line_and_the_others_are_listed(targets, messages, caplog):
    code, out = capture_bundle("launch", "list")
    assert (code, out.splitlines()[-1]) == (0, "slurm:7  RUNNING  /runs/demo")  # after a warning on stderr
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "docker" in warning and "no daemon" in warning and "\n" not in warning
    messages(warning)
    code, out = capture_bundle("launch", "list", "--all")
    assert out.splitlines()[-2:] == ["slurm:7   RUNNING  /runs/demo", "slurm:12  FAILED   /runs/a\\nb"]


def test_the_list_as_json(targets):
    code, out = capture_bundle("launch", "list", "--json", "--all")
    assert code == 0
    assert json.loads(out[out.index("{") :]) == {
        "schema": 1,
        "jobs": [
            {"handle": "slurm:7", "target": "slurm", "state": "RUNNING", "run_directory": "/runs/demo"},
            {"handle": "slurm:12", "target": "slurm", "state": "FAILED", "run_directory": "/runs/a\nb"},
        ],
        "unreachable": {"docker": "no daemon"},
    }


@pytest.mark.processes
def test_a_machine_without_any_cluster_lists_its_own_jobs(running, tmp_path):
    (tmp_path / "bin").mkdir()
    variables = {"PATH": str(tmp_path / "bin"), "KUBECONFIG": str(tmp_path / "none")}
    done = run_bundle("launch", "list", cwd=tmp_path, environment=variables, code=0)
    (line,) = (line for line in done.stdout.splitlines() if str(tmp_path) in line)
    assert line.split("  ") == [f"local:{running}", "RUNNING", str(Path(running).parents[1])]
    assert done.stderr == ""


def test_clients_that_do_not_answer_are_asked_at_the_same_time(tmp_path, monkeypatch):
    wait = (
        f"echo $$ >>{tmp_path}/began; while [ $(wc -l <{tmp_path}/began) -lt 2 ]; do sleep 0.05; done; exit 1"
    )
    clients(tmp_path / "bin", monkeypatch, squeue=wait, docker=wait)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    code, out = capture_bundle("launch", "list", "--json")
    unreachable = json.loads(out[out.index('{\n  "schema"') :])["unreachable"]
    assert code == 0 and sorted(unreachable) == ["docker", "slurm"]
    assert not any("did not answer" in reason for reason in unreachable.values())
