"""Jobs under a real Slurm of three nodes."""

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.command import run_bundle
from tests.targets import cluster

pytestmark = pytest.mark.clusters
RECIPE = (
    "demo",
    "--set=train={steps: 6, micro_batch_size: 4, global_batch_size: 8, log_interval: 1, eval_interval: 6}",
    "--set=optimizer.warmup_steps=0",
    "--set=data.validation=0",
)
OWN_RAY = r"/ray-[0-9a-f]{16}"  # where one writes that a job has started for itself


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    pytest.importorskip("megatron.core")
    if why := cluster.missing():
        pytest.skip(why)
    with cluster.cluster(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


@pytest.fixture
def bundle(environment: dict[str, str], tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return run_bundle(*words, base=environment, cwd=tmp_path, timeout=900)

    return run


def losses(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


def left(pattern: str) -> list[str]:
    """The command lines of processes in which there is such a thing."""
    found = []
    for path in Path("/proc").iterdir():
        with suppress(OSError):  # no process, or it has ended
            line = (path / "cmdline").read_text()
            found += [line] if re.search(pattern, line) else []
    return found


def until(condition: Callable[[], object], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_two_nodes_train_what_one_trains_and_the_launch_ends_as_they_do(bundle, tmp_path):
    ended = bundle("launch", "slurm", *RECIPE, "--nodes=2", "--devices-per-node=1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "step 6/6" in ended.stdout
    assert any(line.startswith("[0/0] ") for line in ended.stdout.splitlines())
    executed = json.loads((tmp_path / "runs/demo/job.json").read_text())
    assert (executed["nodes"], executed["per_node"]) == (2, 1)
    handle = ended.stderr.partition(": ")[0]
    assert re.fullmatch(r"slurm:\d+", handle)
    assert bundle("launch", "logs", handle).stdout == ended.stdout
    assert bundle("launch", "status", handle).stdout == f"{handle} COMPLETED\n"
    assert bundle("launch", "wait", handle).returncode == 0
    alone = bundle("train", *RECIPE, "--run-directory=alone")
    assert alone.returncode == 0, alone.stderr
    assert losses(tmp_path / "runs/demo") == pytest.approx(losses(tmp_path / "alone"), rel=1e-6)


@pytest.mark.parametrize("through", [(), ("--ray",)], ids=["by itself", "through Ray"])
def test_told_to_save_it_is_queued_again_and_goes_on_and_stop_ends_it(bundle, environment, tmp_path, through):
    if through:
        pytest.importorskip("ray")
    long = (*RECIPE, "--set=train.steps=5000", "--nodes=2", "--devices-per-node=1", "--detach", *through)
    submitted = bundle("launch", "slurm", *long)
    handle = submitted.stdout.strip()
    number, run = handle.removeprefix("slurm:"), tmp_path / "runs/demo"
    assert re.fullmatch(r"slurm:\d+", handle), submitted.stderr
    slurm = {"env": environment, "check": True, "timeout": 60}
    jobs = subprocess.run(["scontrol", "--oneliner", "show", "job"], capture_output=True, text=True, **slurm)
    (found,) = (line for line in jobs.stdout.splitlines() if line.startswith(f"JobId={number} "))
    (script,) = (run / "logs").glob("slurm-*/job.sh")
    assert f" Command={script} " in found  # by which one is looked up whose number nobody said
    until(lambda: (run / "metrics.jsonl").exists() and len(losses(run)) > 2)
    whom = ["--batch"] if through else []
    subprocess.run(["scancel", *whom, "--signal=TERM", number], **slurm)  # as its time limit does
    until(lambda: "PENDING" in bundle("launch", "status", handle).stdout)
    first = max(losses(run))
    assert list((run / "checkpoints").iterdir())
    time.sleep(2)  # a job that starts in the second in which it ended has its credential revoked

    def goes_on() -> bool:
        # Slurm has what it requeues wait for two minutes, and says so a while after it is pending.
        subprocess.run(["scontrol", "update", f"JobId={number}", "StartTime=now"], **slurm | {"check": False})
        return max(losses(run)) > first

    until(goes_on)
    assert bundle("launch", "stop", handle).returncode == 0
    assert bundle("launch", "wait", handle).returncode == 75
    assert sorted(losses(run)) == list(range(1, max(losses(run)) + 1))
    until(lambda: not left(rf"{re.escape(str(run))}|{OWN_RAY}"), 60)
    assert "CANCELLED" in bundle("launch", "status", handle).stdout  # ended, and not queued again
    assert bundle("launch", "stop", handle).returncode == 0  # of what has ended: nothing


def test_through_a_ray_cluster_of_its_own_two_nodes_train_what_one_trains(bundle, tmp_path):
    pytest.importorskip("ray")
    before = set(Path(tempfile.gettempdir()).glob("ray-*"))
    ended = bundle("launch", "slurm", *RECIPE, "--nodes=2", "--devices-per-node=1", "--ray")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"^\[0/0\] .*step 6/6", ended.stdout, re.MULTILINE), ended.stdout
    (token,) = (tmp_path / "runs/demo/logs").glob("slurm-*/token")
    assert (token.stat().st_mode & 0o777, len(token.read_text())) == (0o600, 64)
    assert token.read_text() not in ended.stdout
    assert set(Path(tempfile.gettempdir()).glob("ray-*")) == before and not left(OWN_RAY)
    alone = bundle("train", *RECIPE, "--run-directory=alone")
    assert alone.returncode == 0, alone.stderr
    assert losses(tmp_path / "runs/demo") == pytest.approx(losses(tmp_path / "alone"), rel=1e-6)


def test_a_job_that_its_nodes_refuse_ends_with_their_code(bundle, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("gone before a node has read it")
    asked = bundle(
        *("launch", "slurm", *RECIPE, "--set=data.path=[text.txt]", "--hardware=cpu", "--nodes=1"),
        *("--sbatch=begin=now+5", "--detach"),
    )
    text.unlink()
    assert asked.returncode == 0, asked.stderr
    handle = asked.stdout.strip()
    assert bundle("launch", "wait", handle).returncode == 2
    assert "text.txt" in bundle("launch", "logs", handle).stdout


def test_a_recipe_that_cannot_run_is_not_submitted(bundle, tmp_path):
    ended = bundle("launch", "slurm", *RECIPE, "--set=parallel.tp=3", "--nodes=2", "--devices-per-node=1")
    assert ended.returncode == 2
    assert not (tmp_path / "runs").exists()


def test_hostile_names_come_through_slurm_as_they_are(bundle, environment, tmp_path):
    comment = 'it\'s "a" $HOME `id` \\ #1'
    words = ("--sbatch", f"comment={comment}", "--sbatch", "hold", "--run-directory", "a 'b' $c", "--detach")
    submitted = bundle("launch", "slurm", *RECIPE, *words)
    assert submitted.returncode == 0, submitted.stderr
    handle = submitted.stdout.strip()
    shown = subprocess.run(
        ["scontrol", "show", "job", handle.removeprefix("slurm:")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"Comment={comment}" in shown
    assert f"WorkDir={tmp_path}" in shown
    (output,) = (Path(path) for path in re.findall(r"StdOut=(.*)", shown))
    assert re.fullmatch(r"slurm-\d+\.log", output.name)
    assert output.parent.parent == tmp_path / "a 'b' $c/logs"
    assert f"{handle}  PENDING  {tmp_path}/a 'b' $c\n" in bundle("launch", "list").stdout
    assert bundle("launch", "stop", handle).returncode == 0
    assert "CANCELLED" in bundle("launch", "status", handle).stdout
    assert handle not in bundle("launch", "list").stdout
    assert f"{handle}  CANCELLED  " in bundle("launch", "list", "--all").stdout
    assert bundle("launch", "wait", handle).returncode == 143
    assert bundle("launch", "status", "slurm:999999").returncode == 5
