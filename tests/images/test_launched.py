"""`launch docker` on a real engine, with an image that holds nothing: all that runs is mounted from here."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.command import run_bundle
from tests.launch.launched import ROOT

pytestmark = pytest.mark.images
IMAGE = "mcore-bundle-empty:test"
RECIPE = (
    "demo",
    "--set=train={steps: 6, micro_batch_size: 4, global_batch_size: 8, log_interval: 1, eval_interval: 6}",
    "--set=optimizer.warmup_steps=0",
    "--set=data.validation=0",
)
Bundle = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def image(engine) -> Iterator[str]:
    """An image with nothing but /tmp, whose entry is this environment's own."""
    nothing = subprocess.run(
        ["tar", "--create", "--directory=/", "--no-recursion", "--mode=1777", "tmp"],
        capture_output=True,
        check=True,
    ).stdout
    entry = json.dumps([sys.executable, "-m", "bundle"])
    words = ["docker", "import", f"--change=ENTRYPOINT {entry}", "-", IMAGE]
    subprocess.run(words, input=nothing, env=engine.environment, capture_output=True, check=True)
    yield IMAGE
    engine.attempt("rmi", "--force", IMAGE)


@pytest.fixture
def bundle(engine, image: str, tmp_path: Path) -> Iterator[Bundle]:
    tmp_path.chmod(0o755)  # who runs in the container is not root

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return run_bundle("launch", *words, base=engine.environment, cwd=tmp_path, timeout=600)

    yield run
    for name in engine.docker(
        "ps", "--all", "--filter=label=mcore-bundle.owner", "--format={{.Names}}"
    ).split():
        engine.attempt("rm", "--force", name)


def docker(*words: str) -> tuple[str, ...]:
    """The words of a launch whose container sees what this environment is made of, and is who we are."""
    parts = {sys.prefix, sys.base_prefix, str(ROOT), "/usr", "/lib", "/lib64", "/bin"}
    mounts = (f"--mount={part}:{part}:ro" for part in sorted(parts) if Path(part).exists())
    return (
        "docker",
        *RECIPE,
        f"--image={IMAGE}",
        "--image-record=none",
        "--shared-memory=256m",
        "--env=PYTHONPATH",
        *mounts,
        *words,
    )


def losses(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


def test_a_container_trains_and_the_launch_ends_as_it_does(bundle, engine, tmp_path):
    ended = bundle(*docker())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "step 6/6" in ended.stdout
    assert sorted(losses(tmp_path / "runs/demo")) == [1, 2, 3, 4, 5, 6]
    handle = ended.stderr.partition(": ")[0]
    assert bundle("status", handle).stdout == f"{handle} EXITED\n"
    assert bundle("logs", handle).stdout == ended.stdout
    assert bundle("wait", handle).returncode == 0
    made = json.loads(engine.docker("inspect", handle.removeprefix("docker:")))[0]
    assert made["HostConfig"]["ReadonlyRootfs"] and made["HostConfig"]["CapDrop"] == ["ALL"]
    user = os.getuid() or 10001
    assert made["Config"]["User"] == f"{user}:0"
    assert (tmp_path / "runs/demo/metrics.jsonl").stat().st_uid == user
    listed = bundle("list", "--all").stdout.splitlines()
    assert [handle, "EXITED", str(tmp_path / "runs/demo")] in [line.split() for line in listed]
    again = bundle(*docker("--resume"))
    assert again.returncode == 0 and "finished" in again.stdout


def test_stopped_it_saves_and_the_same_command_goes_on(bundle, tmp_path):
    long = docker("--set=train.steps=5000", "--detach")
    submitted = bundle(*long)
    handle = submitted.stdout.strip()
    assert re.fullmatch(r"docker:[\w.-]+", handle), submitted.stderr
    refused = bundle(*long)
    assert refused.returncode == 5 and handle in refused.stderr
    deadline = time.monotonic() + 600
    while not (tmp_path / "runs/demo/metrics.jsonl").exists():
        assert time.monotonic() < deadline and bundle("status", handle).stdout.endswith("RUNNING\n")
        time.sleep(1)
    assert bundle("stop", handle).returncode == 0
    assert bundle("wait", handle).returncode == 75
    saved = max(losses(tmp_path / "runs/demo"))
    assert bundle(*long).stdout.strip() == handle
    while max(losses(tmp_path / "runs/demo")) <= saved:
        assert time.monotonic() < deadline
        time.sleep(1)
    assert f"after step {saved}" in bundle("logs", handle).stdout
