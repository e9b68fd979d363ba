"""What Ray is asked for a job, and what its answers mean. What it does with that: test_ray_runs.py."""

import re
import shlex
import socket
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bundle.errors import UsageError
from bundle.launch.job import Job
from bundle.launch.rendezvous import Rendezvous
from bundle.targets import ray, raycluster
from bundle.targets.ray import RayOptions
from bundle.targets.raylets import NodeActor
from bundle.targets.states import JobState
from tests.command import run_bundle
from tests.targets.test_docker import decided

GOLDEN = Path(__file__).parent / "golden"
WORDS = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=20)


@pytest.fixture(scope="module")
def job() -> Job:
    return decided("cuda", "h200", 2, 8)


@pytest.mark.parametrize(
    ("name", "machine"),
    [
        ("cuda", ("cuda", "h200", 2, 8)),
        ("ascend", ("ascend", "a3", 2, 4)),
        ("cpu", ("cpu", "cpu", 2, 1)),
    ],
)
def test_the_requests_are_the_golden_ones(name, machine):
    job = decided(*machine)
    options = RayOptions("https://head:8265", restarts=3, python="/venv/bin/python")
    found = ray.render_dry_run(job, options, Path("/work")).replace(
        ray.get_job_directory(job).name, "ray-DIGEST"
    )
    assert found == (GOLDEN / f"ray-{name}.json").read_text()


@settings(max_examples=40)
@given(workdir=WORDS, directory=WORDS)
def test_hostile_names_reach_the_driver_as_they_are(job, workdir, directory):
    job = replace(job, directory=Path("/runs") / directory)
    entrypoint = ray.build_request(job, RayOptions("http://h:1"), Path("/w") / workdir)["entrypoint"]
    recorder = "cd() { printf '%s\\0' \"$1\"; }; exec() { printf '%s\\0' \"$@\"; }; "
    done = subprocess.run(["bash", "-c", recorder + entrypoint], capture_output=True, text=True, check=True)
    where, *words = done.stdout.split("\0")[:-1]
    assert where == str(Path("/w") / workdir)
    assert f"--job={ray.get_job_directory(job) / 'job.json'}" in words == shlex.split(entrypoint)[4:]


@pytest.mark.parametrize("address", ["head:8265", "ray://head:10001", "http://", "http://a\nb"])
def test_an_address_that_takes_no_jobs_is_refused(job, address, messages):
    with pytest.raises(UsageError, match="--address") as error:
        ray.build_request(job, RayOptions(address), Path("/work"))
    messages(error.value)


@pytest.mark.parametrize(
    ("said", "code", "state"),
    [
        ("PENDING", None, JobState("PENDING", "", None)),
        ("RUNNING", None, JobState("RUNNING", "", None)),
        ("SUCCEEDED", 0, JobState("SUCCEEDED", "", 0)),
        ("FAILED", 75, JobState("FAILED", "", 75)),
        ("FAILED", -9, JobState("FAILED", "", 137)),
        ("STOPPED", None, JobState("STOPPED", "", 143)),
        ("FAILED", None, JobState("FAILED", "its head\\ndied", 5)),
        ("FAILED", 126, JobState("FAILED", "the shell could not start Python on the cluster", 5)),
        ("FAILED", 127, JobState("FAILED", "the shell could not start Python on the cluster", 5)),
    ],
)
def test_a_job_ends_with_the_code_of_its_driver(monkeypatch, said, code, state):
    status = SimpleNamespace(value=said)
    answer = SimpleNamespace(status=status, driver_exit_code=code, message="its head\ndied")
    known = {("http://head:8265", "raysubmit_1"): answer}

    def client(address: str) -> SimpleNamespace:
        return SimpleNamespace(get_job_info=lambda number: known[address, number])

    monkeypatch.setattr(ray, "_connect", client)
    assert ray.query_state("raysubmit_1@http://head:8265") == state


def test_what_ray_sends_into_a_node_that_is_read_does_not_end_it(tmp_path):
    node = NodeActor().run(("launch", "status", "no-handle"), str(tmp_path))
    lines = [next(node)]
    with suppress(StopIteration):
        while True:
            lines.append(node.send(object()))
    assert "no-handle" in "".join(map(str, lines[:-1]))
    assert lines[-1] == 2


def test_who_started_rays_machines_says_nothing_of_the_nodes_of_a_job(tmp_path, monkeypatch):
    slurm = {"JOB_ID": "1", "STEP_ID": "0", "NNODES": "2", "NODEID": "1", "JOB_NODELIST": "gpu[1-2]"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    words = ("train", "demo", "--backend=cpu", "--nodes=2", "--node-rank=0", "--rendezvous=h:1", "--dry-run")
    *lines, code = NodeActor().run(words, str(tmp_path))
    assert code == 0, lines


@pytest.mark.parametrize(
    ("machine", "asked"),
    [
        (("cuda", "h200", 2, 8), {"--num-cpus=1", "--num-gpus=8"}),
        (("ascend", "a3", 2, 4), {"--num-cpus=1", '--resources={"NPU": 4.0}'}),
    ],
)
def test_a_cluster_of_its_own_has_the_devices_of_the_job_and_a_dashboard_that_is_not_public(machine, asked):
    job = decided(*machine)
    head = raycluster.build_head_or_worker_arguments(job, "10.0.0.1:20001", "10.0.0.1", Path("/tmp/ray-0123"))
    other = raycluster.build_head_or_worker_arguments(job, "10.0.0.1:20001", "10.0.0.2", None)
    alike = {"start", "--block", "--disable-usage-stats", "--object-store-memory=100000000", *asked}
    for words, own, where in (
        (head, "10.0.0.1", {"--head", "--port=20001", "--temp-dir=/tmp/ray-0123"}),
        (other, "10.0.0.2", {"--address=10.0.0.1:20001"}),
    ):
        assert alike | where | {f"--node-ip-address={own}"} <= set(words)
    assert "--dashboard-host=127.0.0.1" in head
    assert not {each for each in other if each.startswith(("--head", "--dashboard-host", "--temp-dir"))}


def test_others_reach_the_head_where_its_own_name_means_a_loopback_address(monkeypatch):
    for resolved, reached in (
        ("10.0.0.1", "10.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.1.1", "10.9.9.9"),
    ):
        monkeypatch.setattr(socket, "gethostbyname", {"gpu1": resolved}.__getitem__)
        monkeypatch.setattr(raycluster, "find_own_address", lambda other: "10.9.9.9")
        assert raycluster._resolve_reachable_head_address("gpu1") == reached


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"nodes": 3}, "(nodes: 2), but slurm has 3 (two tasks)"),
        ({"rank": 1, "local_rank": 1, "world_size": 4}, "(nodes: 2), but slurm has 2 (two tasks)"),
    ],
)
def test_other_machines_than_those_of_the_job_are_no_cluster_of_it(job, tmp_path, place, said):
    where = Rendezvous(2, 0, "h", 1, "slurm", "two tasks")._replace(**place)
    with pytest.raises(UsageError, match=re.escape(said)):
        raycluster.run_node(job, tmp_path / "job.json", where, lambda: 0, 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("a\nb"), "a\\nb"),
        (KeyError(), "KeyError"),
        (type("TaskError", (Exception,), {"cause": ValueError("x")})("long"), "x"),
    ],
)
def test_an_error_says_on_one_line_why(error, said):
    assert ray.describe_error(error) == said


def launched(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_bundle("launch", *words, cwd=folder)


def test_what_contradicts_itself_is_refused(tmp_path):
    for words, said in (
        (("ray",), "name what to run"),
        (("ray", "demo", "--detach"), "name the cluster"),
        (("ray", "demo", "--start"), "--start: needs --job FILE"),
        (("ray", "--job=j.json", "--start", "--address=http://h:1"), "--start: needs --job FILE"),
        (("status", "ray:raysubmit_1"), "ray:raysubmit_1"),
    ):
        done = launched(*words, folder=tmp_path)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
