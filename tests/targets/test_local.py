"""A node of a job on this machine: its command, and what is asked of it by the name of its folder."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bundle.errors import TargetUnavailable, UsageError
from bundle.launch.job import Job
from bundle.targets import docker, local, ray
from bundle.targets.local import LocalOptions
from bundle.targets.slurm import batch
from bundle.targets.slurm.options import SlurmOptions as SlurmOptions
from bundle.targets.states import JobState
from tests.command import run_bundle
from tests.targets.test_docker import decided
from tests.training.test_interruption import TINY

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(
    ("name", "machine", "options"),
    [
        ("cuda", ("cuda", "h200", 2, 8), LocalOptions(3, python="/venv/bin/python")),
        ("ascend", ("ascend", "a3", 1, 4), LocalOptions(mcore="/src/Megatron-LM", python="/venv/bin/python")),
        ("cpu", ("cpu", "cpu", 1, 2), LocalOptions(python="/venv/bin/python")),
    ],
)
def test_the_commands_are_the_golden_ones(tmp_path, name, machine, options):
    job = replace(decided(*machine), directory=tmp_path / "demo")  # its attempts are counted on this disk
    found = local.render_dry_run(job, options, "node0:29500" if job.nodes > 1 else "")
    assert (
        found.replace(str(tmp_path), "/runs").replace(" --", " \\\n  --")
        == (GOLDEN / f"local-{name}.sh").read_text()
    )


@pytest.mark.parametrize(("rendezvous", "value"), [("", "2 nodes"), ("node0", "--rendezvous 'node0'")])
def test_several_nodes_are_told_where_they_meet(rendezvous, value, messages):
    job = decided("cuda", "h200", 2, 8)
    with pytest.raises(UsageError, match=value) as error:
        local.build_node_command(job, LocalOptions(), Path("/runs"), 1, rendezvous)
    messages(error.value)


def test_where_nobody_says_where_they_meet_a_dry_run_has_a_place_for_it(tmp_path):
    text = local.render_dry_run(replace(decided("cuda", "h200", 2, 8), directory=tmp_path), LocalOptions())
    assert "--node-rank=1 --rendezvous=HOST:29500\n" in text
    assert "--master-addr HOST" in text or "--master_addr=HOST" in text or "HOST" in text.split("# which")[1]


@pytest.mark.parametrize("asked", [True, False])
def test_preflight_is_asked_of_what_starts_a_node_where_somebody_asks_for_it(asked):
    job = decided("cpu", "cpu", 1, 2)
    folder = Path("/runs")
    said = (
        local.build_node_command(job, LocalOptions(preflight=asked), folder).to_redacted_shell(),
        docker.build_node_command(
            job, docker.DockerOptions("bundle", preflight=asked), folder
        ).to_redacted_shell(),
        batch.build_script(job, SlurmOptions(preflight=asked), folder),
        batch.build_script(job, SlurmOptions(preflight=asked, ray=True), folder),
        ray.build_request(job, ray.RayOptions(preflight=asked), folder)["entrypoint"],
    )
    assert [" --preflight" in text for text in said] == [asked] * 5


@pytest.fixture
def job(tmp_path) -> Job:
    return replace(decided("cpu", "cpu", 1, 2), directory=tmp_path / "it's $HOME")


@pytest.fixture
def node(tmp_path) -> Callable[[str], LocalOptions]:
    """Options by which a node does what a shell script says, in the place of Python."""

    def does(script: str) -> LocalOptions:
        program = tmp_path / "a 'python'"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return LocalOptions(python=str(program))

    return does


def until(condition: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_a_node_is_told_and_writes_and_the_code_that_it_ends_with(job, node, tmp_path):
    name = local.submit(job, node('echo "$@"; echo "in $PWD" >&2; exit 6'), tmp_path)
    said = "".join(local.follow(name))
    command, folder = said.splitlines()
    assert command.split(" ", 3) == ["-m", "bundle", "train", f"--job={name}/job.json"]
    assert folder == f"in {tmp_path}" and said == local.read_log(name)
    assert json.loads(Path(name, "job.json").read_text()) == job.dump()
    assert local.query_state(name) == JobState("FAILED", "code 6", 6)
    assert local.wait(name) == 6
    local.request_stop(name)  # of what has ended: nothing
    again = local.submit(job, node("exit 0"), tmp_path)
    assert again != name
    assert local.wait(again) == 0 and local.query_state(again) == JobState("COMPLETED", "", 0)


def test_nodes_that_are_started_at_once_have_folders_of_their_own(job, node, tmp_path, monkeypatch):
    command = local.build_node_command

    def between(job, options, folder, *rest):
        if folder.name in ("local-1", "local-2"):  # other nodes make theirs, once it is known which are free
            folder.mkdir(parents=True)
        return command(job, options, folder, *rest)

    monkeypatch.setattr(local, "build_node_command", between)
    name = local.submit(job, node('echo "$@"'), tmp_path)
    assert Path(name).name == "local-3"
    assert local.wait(name) == 0 and f"--job={name}/job.json" in local.read_log(name)


def test_a_node_that_is_told_to_stop_says_how_it_ended(job, node, tmp_path):
    name = local.submit(
        job, node('trap "echo saved; exit 75" TERM; echo up; while :; do sleep 0.1; done'), tmp_path
    )
    until(lambda: "up" in local.read_log(name))
    assert local.query_state(name) == JobState("RUNNING", "", None)
    local.request_stop(name)
    assert local.wait(name) == 75
    assert local.read_log(name).splitlines()[-1] == "saved"


def test_a_node_that_was_killed_with_all_that_belongs_to_it_is_lost(job, node, tmp_path, messages):
    name = local.submit(job, node("exec sleep 60"), tmp_path)
    group = int(Path(name, "group").read_text().split()[0])
    os.killpg(group, signal.SIGKILL)
    until(lambda: local.query_state(name).name == "LOST")
    state = local.query_state(name)
    assert (state.name, state.code) == ("LOST", 5)
    messages(state.reason)
    assert local.wait(name) == 5


def test_a_node_outlives_a_shell_that_is_killed_and_is_still_stopped(job, node, tmp_path):
    name = local.submit(job, node('trap "exit 75" TERM; echo up; while :; do sleep 0.1; done'), tmp_path)
    until(lambda: "up" in local.read_log(name))
    os.kill(int(Path(name, "group").read_text().split()[0]), signal.SIGKILL)
    assert local.query_state(name).name == "RUNNING"
    local.request_stop(name)
    until(lambda: local.query_state(name).name == "LOST")


def test_a_node_of_another_machine_is_not_stopped_here(job, node, tmp_path, messages):
    name = local.submit(job, node('trap "exit 75" TERM; echo up; while :; do sleep 0.1; done'), tmp_path)
    until(lambda: "up" in local.read_log(name))
    group = Path(name, "group")
    said = group.read_text()
    group.write_text(f"{said.split()[0]} elsewhere")
    with pytest.raises(TargetUnavailable, match="elsewhere") as error:
        local.request_stop(name)
    messages(error.value)
    group.write_text(said)
    local.request_stop(name)
    local.wait(name)


def test_where_nothing_was_launched_it_is_said(tmp_path, messages):
    for asked in (local.query_state, local.wait, local.read_log, local.request_stop):
        with pytest.raises(TargetUnavailable, match=f"local:{tmp_path}") as error:
            asked(str(tmp_path))
        messages(error.value)


@pytest.mark.world
@pytest.mark.slow
def test_a_launch_shows_what_its_job_writes_and_ends_as_it_does(tmp_path):
    pytest.importorskip("megatron.core")

    def bundle(*words: str) -> subprocess.CompletedProcess[str]:
        return run_bundle("launch", *words, cwd=tmp_path, timeout=900)

    recipe = ("local", "demo", *(f"--set={override}" for override in TINY))
    ended = bundle(*recipe)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "finished: loss" in ended.stdout
    handle = ended.stderr.partition(": ")[0]
    target, _, folder = handle.partition(":")
    assert (target, Path(folder).name) == ("local", "local-1")
    assert Path(folder).parent == tmp_path / "runs/demo/logs"
    assert bundle("status", handle).stdout == f"{handle} COMPLETED\n"
    refused = bundle(*recipe, "--detach")
    assert refused.returncode == 2 and "--fresh" in refused.stderr
    missing = bundle(*recipe, "--run-directory=other", "--set=data.path=[nowhere.txt]")
    assert missing.returncode == 2 and "nowhere.txt" in missing.stderr
    assert not (tmp_path / "other").exists()
