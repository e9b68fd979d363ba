"""The commands of docker, and what its client is asked. What an engine does with them: tests/images."""

import os
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bundle.errors import TargetUnavailable, UsageError
from bundle.launch.job import Job, from_plan
from bundle.planning import build_plan
from bundle.recipe import load
from bundle.targets import docker, images
from bundle.targets.docker import DockerOptions
from tests.command import run_bundle
from tests.targets.stderr import drop_times

GOLDEN = Path(__file__).parent / "golden"
WORDS = st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters=":"), min_size=1, max_size=20)


def decided(backend: str, hardware: str, nodes: int, per_node: int) -> Job:
    made = build_plan(
        load("demo", ["train.global_batch_size=64"]),
        backend=backend,
        hardware_name=hardware,
        mcore="0.16.1",
        nodes=nodes,
        per_node=per_node,
    )
    return from_plan(made, Path("/runs/demo"))


@pytest.fixture(scope="module")
def job() -> Job:
    return decided("cuda", "h200", 2, 8)


@pytest.mark.parametrize(
    ("name", "machine", "options"),
    [
        (
            "cuda",
            ("cuda", "h200", 2, 8),
            DockerOptions("registry.example:5000/us/bundle:1", user="1000:0", rdma=True, owner="1000"),
        ),
        (
            "ascend",
            ("ascend", "a3", 1, 4),
            DockerOptions(
                "bundle@sha256:0123", ("/data:/data:ro",), user="1000:0", groups=(1001,), owner="1000"
            ),
        ),
        (
            "cpu",
            ("cpu", "cpu", 1, 2),
            DockerOptions("bundle", ("/data",), ("HF_TOKEN",), "1000:0", (), "1g", owner="1000"),
        ),
    ],
)
def test_the_commands_are_the_golden_ones(name, machine, options):
    job = decided(*machine)
    meeting = "node0:29500" if job.nodes > 1 else ""
    found = docker.render_dry_run(job, options, Path("/work"), meeting).replace(
        docker.get_job_directory(job).name[7:], "DIGEST"
    )
    assert found.replace(" --", " \\\n  --") == (GOLDEN / f"docker-{name}.sh").read_text()


@settings(max_examples=40)
@given(workdir=WORDS, directory=WORDS, mount=WORDS)
def test_hostile_names_reach_docker_as_they_are(job, workdir, directory, mount):
    job = replace(job, nodes=1, directory=Path("/runs") / directory)
    text = docker.build_node_command(
        job, DockerOptions("bundle", (f"/data/{mount}",)), Path("/w") / workdir
    ).to_redacted_shell()
    printed = subprocess.run(
        ["bash", "-c", f"docker() {{ printf '%s\\0' \"$@\"; }}; {text}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")[:-1]
    assert printed == shlex.split(text)[1:]
    assert printed[-1] == f"--job={docker.get_job_directory(job) / 'job.json'}"
    assert f"--volume=/data/{mount}:/data/{mount}" in printed
    assert f"--workdir={Path('/w') / workdir}" in printed


def test_all_that_cannot_be_written_is_refused_at_once(job, messages):
    options = DockerOptions("--privileged", ("data", "/a:/b:rw"), ("HF TOKEN", "A=B"), "", (), "much")
    with pytest.raises(UsageError) as refused:
        docker.build_node_command(replace(job, directory=Path("/runs/a:b")), options, Path("/work"))
    text = str(refused.value)
    for part in (
        "--image '--privileged'",
        "--mount 'data'",
        "--mount '/a:/b:rw'",
        "--env 'HF TOKEN'",
        "--env 'A=B'",
        "--shared-memory 'much'",
        "'/runs/a:b'",
        "2 nodes",
    ):
        assert part in text, text
    messages(text)


def test_a_recipe_alone_is_enough_for_what_would_run(tmp_path, messages):
    def said(*words: str) -> subprocess.CompletedProcess[str]:
        return run_bundle("launch", "docker", "demo", "--backend=cpu", *words, cwd=tmp_path)

    done = said("--dry-run", "--nodes=2")
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line) for line in done.stdout.splitlines() if not line.startswith("#")]
    (of_cpu,) = (each for each in images.load_images() if each.backend == "cpu")
    for node, words in enumerate(commands):
        assert f"{images.LOCAL_BUILD_IMAGE_PREFIX}/{of_cpu.tag}" in words
        assert words[-2:] == [f"--node-rank={node}", "--rendezvous=HOST:29500"]
    assert len(commands) == 2
    assert "--image-record" in done.stderr
    messages(drop_times(done.stderr))
    done = said("--nodes=2")  # what is run is told where
    assert (done.returncode, done.stdout) == (2, "")
    assert "--rendezvous" in done.stderr
    messages(drop_times(done.stderr))
    assert list(tmp_path.iterdir()) == []


def test_the_container_of_a_job_is_named_after_what_the_job_is(job):
    assert (
        docker.build_container_name(job, 1)
        == docker.build_container_name(job, 1)
        != docker.build_container_name(job, 0)
    )
    assert docker.build_container_name(replace(job, per_node=4), 1) != docker.build_container_name(job, 1)
    assert docker.build_container_name(job, 1).startswith("mcore-bundle-demo-")


def test_without_docker_it_is_said(job, tmp_path, monkeypatch, messages):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TargetUnavailable, match="docker") as error:
        docker.submit(replace(job, nodes=1, directory=tmp_path / "run"), DockerOptions("bundle"), tmp_path)
    messages(error.value)


@pytest.mark.parametrize(
    ("said", "name", "code"),
    [
        ("running false 0 ", "RUNNING", None),
        ("exited false 75 ", "EXITED", 75),
        ("exited true 137 ", "EXITED", 137),
        ("created false 0 ", "CREATED", None),
        ("created false 128 no such device", "CREATED", 5),
    ],
)
def test_a_container_ends_with_its_own_code(tmp_path, monkeypatch, said, name, code, messages):
    client = tmp_path / "docker"
    client.write_text(f"#!/bin/sh\necho '{said}'\n")
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    state = docker.query_state("x")
    assert (state.name, state.code) == (name, code)
    messages(state.reason)


def client(folder: Path, script: str) -> None:
    """A `docker` that writes down what it is asked."""
    program = folder / "docker"
    program.write_text(f'#!/bin/sh\necho "$@" >>{folder}/asked\n{script}\n')
    program.chmod(0o755)


def test_what_the_engine_could_not_start_is_started_again(job, tmp_path, monkeypatch):
    failed = "created false 128 could not select device driver"
    client(tmp_path, f"case $1 in ps) echo abc ;; inspect) echo '{failed}' ;; esac")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    job = replace(job, nodes=1, directory=tmp_path / "run")
    name = docker.submit(job, DockerOptions("bundle"), tmp_path)
    asked = [line.split()[0] for line in (tmp_path / "asked").read_text().splitlines()]
    assert asked == ["ps", "inspect", "rm", "run"] and name == docker.build_container_name(job, 0)


def test_who_follows_a_container_takes_its_client_along(tmp_path):
    client(tmp_path, f"echo $$ >{tmp_path}/pid; echo up; exec sleep 60")
    follow = "from bundle.targets import docker\nfor text in docker.follow('x'): print(text, flush=True)"
    path = {**os.environ, "PATH": f"{tmp_path}:/bin:/usr/bin"}
    with subprocess.Popen([sys.executable, "-c", follow], env=path, stdout=subprocess.PIPE) as follower:
        assert follower.stdout is not None and follower.stdout.readline() == b"up\n"
        follower.terminate()
    process, deadline = Path("/proc", (tmp_path / "pid").read_text().strip()), time.monotonic() + 20
    while process.exists() and "Z (" not in (process / "stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def root() -> None:
    if os.geteuid() != 0:
        pytest.skip("not root")


def test_the_container_of_root_is_not_roots(root, tmp_path):
    run = tmp_path / "run"
    assert docker.choose_nonroot_user(run) == f"{images.USER}:0"
    run.mkdir()
    assert docker.choose_nonroot_user(run) == f"{images.USER}:0"
    os.chown(run, 1234, -1)
    assert docker.choose_nonroot_user(run) == "1234:0"
    tmp_path.chmod(0o755)
    done = run_bundle("launch", "docker", "demo", "--backend=cpu", "--dry-run", cwd=tmp_path, code=0)
    assert f" --user={images.USER}:0 " in done.stdout


@pytest.mark.parametrize(
    ("mode", "uid", "gid", "can_enter"),
    [
        (0o710, 0, 0, True),
        (0o701, 0, 0, False),
        (0o701, 0, 5, True),
        (0o710, 0, 5, False),
        (0o700, images.USER, 5, True),
        (0o677, images.USER, 5, False),
    ],
)
def test_whether_the_user_of_the_container_can_enter_a_directory(root, tmp_path, mode, uid, gid, can_enter):
    place = tmp_path / "place"
    place.mkdir()
    os.chown(place, uid, gid)
    place.chmod(mode)
    tmp_path.chmod(0o755)
    command = ("setpriv", f"--reuid={images.USER}", "--regid=0", "--clear-groups", "test", "-x", "place")
    done = subprocess.run(command, cwd=tmp_path, check=False)
    assert (done.returncode == 0) is docker._can_enter(place, images.USER, 0) is can_enter


def test_a_working_directory_that_the_user_of_the_container_cannot_enter_is_refused(
    job, root, tmp_path, monkeypatch, messages
):
    client(tmp_path, "exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    tmp_path.chmod(0o700)
    job = replace(job, nodes=1, directory=tmp_path / "run")
    with pytest.raises(UsageError, match="--user 10001:0") as error:
        docker.submit(job, DockerOptions("bundle", user="10001:0"), tmp_path)
    assert str(tmp_path) in str(error.value)
    messages(error.value)
    assert not (tmp_path / "asked").exists() and not job.directory.exists()
    docker.submit(job, DockerOptions("bundle", user="0:0"), tmp_path)


def test_root_gives_its_own_files_of_a_run_to_the_user_of_the_container(job, root, tmp_path, monkeypatch):
    client(tmp_path, "exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    tmp_path.chmod(0o755)
    run, beyond = tmp_path / "run", tmp_path / "beyond"
    (run / "checkpoints").mkdir(parents=True)
    (beyond / "below").mkdir(parents=True)
    (run / "checkpoints/latest").write_text("step-1")
    (run / "other").touch()
    os.chown(run / "other", 1234, -1)
    (run / "link").symlink_to(beyond)
    job = replace(job, nodes=1, directory=run)
    docker.submit(job, DockerOptions("bundle", user="4242:0"), tmp_path)
    owners = {path.name: path.lstat().st_uid for path in (run, *run.rglob("*"))}
    assert owners.pop("other") == 1234
    del owners["link"]  # nobody asks who owns a link
    assert {"run", "checkpoints", "latest", "logs", "job.json"} <= owners.keys()
    assert set(owners.values()) == {4242}
    assert beyond.stat().st_uid == (beyond / "below").stat().st_uid == 0
    # A user by name has no number here, and root stays root where somebody asks for it.
    os.chown(run, 0, -1)
    for user in ("trainer", "0:0"):
        docker.submit(job, DockerOptions("bundle", user=user), tmp_path)
        assert run.stat().st_uid == 0


def test_the_user_of_the_container_of_root_reads_the_job_and_writes_the_run(job, root, tmp_path, monkeypatch):
    client(tmp_path, "exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    tmp_path.chmod(0o755)
    job = replace(job, nodes=1, directory=tmp_path / "run")
    user, before = docker.choose_nonroot_user(job.directory), os.umask(0o077)
    try:
        docker.submit(job, DockerOptions("bundle", user=user), tmp_path)
    finally:
        os.umask(before)
    read = "import os, sys; os.makedirs('run/checkpoints'); print(len(open(sys.argv[1]).read()))"
    command = ["setpriv", f"--reuid={images.USER}", "--regid=0", "--clear-groups", "--inh-caps=-all"]
    file = docker.get_job_directory(job) / "job.json"
    command += ["--bounding-set=-all", "/usr/bin/env", "python3", "-c", read, str(file.relative_to(tmp_path))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{file.stat().st_size}\n"), done.stderr


def test_the_host_of_an_image_is_written_in_any_case():
    options = DockerOptions("Registry.Example:5000/us/bundle:1")
    assert list(options.find_violations()) == []


def test_who_runs_in_a_container_is_in_the_group_that_may_open_the_npus(tmp_path):
    (tmp_path / "davinci0").touch()
    assert docker.find_npu_unix_groups(tmp_path / "davinci0") == (os.getgid(),)
    assert docker.find_npu_unix_groups(tmp_path / "davinci1") == ()
    words = ("--hardware=a3", "--group=1001", "--set=train.global_batch_size=128", "--dry-run")
    done = run_bundle("launch", "docker", "demo", *words, cwd=tmp_path)
    assert " --group-add=1001 " in done.stdout, done.stderr


@pytest.mark.parametrize("handle", ["docker:", "docker:a b", "slurm:1x", "slurm:", "pod:x", "1234"])
def test_what_is_no_handle_is_refused(handle, tmp_path, messages):
    done = run_bundle("launch", "status", handle, cwd=tmp_path)
    assert done.returncode == 2 and handle in done.stderr
    messages(drop_times(done.stderr))
