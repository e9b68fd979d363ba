"""Real runs that meet what breaks runs: the verdict, the exit code, and what is left of the run."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from bundle.environment.image import BuildInfo
from bundle.launch.job import UNDECIDED, from_plan
from bundle.launch.outcomes import get_node_name
from bundle.patches.megatron_core import DEFAULT_RELEASE
from bundle.planning import build_plan
from bundle.recipe import load
from tests import command
from tests.command import finish
from tests.launch.launched import reserved
from tests.runs.numbers import learned
from tests.training.test_interruption import TINY, stopped_at
from tests.training.verdicts import find_resumed_steps, read_verdict

pytestmark = pytest.mark.world
DIGEST = "[0-9a-f]{16}"
HAS_NAMESPACES = os.geteuid() == 0 and shutil.which("unshare") is not None


def numbers(directory: Path) -> list[dict[str, object]]:
    return learned((directory / "metrics.jsonl").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    pytest.importorskip("megatron.core")
    directory = tmp_path_factory.mktemp("whole") / "run"
    finish(command.start_training("demo", directory, TINY))
    return directory


@pytest.mark.skipif(not HAS_NAMESPACES, reason="needs root, and unshare")
@pytest.mark.slow
def test_a_disk_that_is_full_at_a_checkpoint_loses_none_and_the_run_goes_on_when_it_has_room(whole, tmp_path):
    size = sum(path.stat().st_size for path in (whole / "checkpoints" / "step-00000012").rglob("*"))
    place = tmp_path / "run" / "checkpoints"
    place.mkdir(parents=True)
    # A file system of its own, with room for one checkpoint and a half, and then for all.
    script = f"""mount -t tmpfs -o size={size * 3 // 2} none "$0"
    "$@" || echo "code $?"
    ls "$0"
    mount -o remount,size=1g "$0"
    "$@"
    """
    within = ("unshare", "--mount", "sh", "-ec", script, place)
    keys = (*TINY, "checkpoint.keep=3")
    said = finish(command.start_training("demo", tmp_path / "run", keys, within=within), timeout=900)
    assert "code 1\nlatest\nstep-00000005\n" in said, said
    verdict = read_verdict(tmp_path / "run")
    assert (verdict["kind"], verdict["action"]) == ("disk", "stop") and verdict["sentence"] in said
    assert f"{place}/" in verdict["cause"] and "checkpoint.keep" in verdict["cause"]
    assert find_resumed_steps(said) == [5]
    assert numbers(tmp_path / "run") == numbers(whole)


@pytest.mark.slow
def test_sigterm_inside_a_checkpoint_completes_it_and_ends_with_75(whole, tmp_path):
    directory = tmp_path / "run"
    each = ("--set", "checkpoint.interval=1")
    process = command.start_training("demo", directory, TINY, *each)
    deadline = time.monotonic() + 300
    while not list((directory / "checkpoints").glob(".writing-*")):
        assert process.poll() is None and time.monotonic() < deadline
    process.send_signal(signal.SIGTERM)
    said = finish(process, 75)
    step = stopped_at(said)
    verdict = read_verdict(directory)
    assert verdict["kind"] == "preempted" and said.splitlines()[-1].endswith(verdict["sentence"])
    left = sorted(path.name for path in (directory / "checkpoints").iterdir())
    assert left[-1] == f"step-{step:08d}" and not [name for name in left if name.startswith(".")]
    assert find_resumed_steps(finish(command.start_training("demo", directory, TINY, *each))) == [step]
    assert numbers(directory) == numbers(whole)


def check_refusal(folder: Path, node: int, sentence: str) -> str:
    """Return why the one rank of a node refused the job, whose launcher said `sentence` at last."""
    verdict = read_verdict(folder / "run", node)
    assert (verdict["kind"], verdict["rank"], verdict["action"]) == ("refused", node, "stop")
    assert sentence.endswith(verdict["sentence"])
    return str(verdict["cause"])


@pytest.mark.slow
def test_nodes_that_were_told_of_different_jobs_both_end_and_say_in_what_they_differ(tmp_path):
    pytest.importorskip("megatron.core")
    with reserved() as port:
        started = [
            command.start_training(
                "demo",
                tmp_path / "run",
                (*TINY, f"seed={seed}"),
                *(
                    "--nodes=2",
                    f"--node-rank={node}",
                    "--devices-per-node=1",
                    f"--rendezvous=127.0.0.1:{port}",
                ),
            )
            for node, seed in enumerate((1, 2))
        ]
        said = [finish(process, 3).splitlines()[-1] for process in started]
    for node, sentence in enumerate(said):
        assert re.search(
            rf"job \(rank 0: {DIGEST}; rank 1: {DIGEST}\)", check_refusal(tmp_path, node, sentence)
        )


@pytest.mark.skipif(not HAS_NAMESPACES, reason="needs root, and unshare")
@pytest.mark.parametrize("decided", [True, False], ids=["each has its own", "nobody said which"])
@pytest.mark.slow
def test_nodes_of_different_images_both_end_and_say_so(tmp_path, decided):
    pytest.importorskip("megatron.core")
    recipe = "demo"
    if not decided:
        plan = build_plan(
            load("demo", TINY), backend="cpu", hardware_name="cpu", mcore=DEFAULT_RELEASE, nodes=2, per_node=1
        )
        job = from_plan(plan, tmp_path / "run", record=UNDECIDED)
        (tmp_path / "job.json").write_text(job.to_text())
        recipe = f"--job={tmp_path / 'job.json'}"
    # What is in the image, in a mount namespace of each node: the machine's own /opt stays as it is.
    script = 'mount -t tmpfs none /opt; mkdir /opt/bundle; cp "$0" /opt/bundle/build-info.json; exec "$@"'
    started = []
    with reserved() as port:
        for node, torch in enumerate(("2.13.0", "2.12.0")):
            record = tmp_path / f"{node}.json"
            record.write_text(
                BuildInfo(
                    schema=1, stack="cpu", revision="r1", inputs="i1", python="3.11.7", sources={},
                    packages={"torch": torch},
                ).to_json()
            )  # fmt: skip
            words = ["train", recipe, "--nodes=2", f"--node-rank={node}", f"--rendezvous=127.0.0.1:{port}"]
            if decided:
                words += ["--devices-per-node=1", f"--run-directory={tmp_path / 'run'}"]
                words += [f"--set={override}" for override in TINY]
            inside = ("unshare", "--mount", "sh", "-ec", script, record)
            started.append(command.start_bundle(*words, cwd=command.ROOT, within=inside))
        said = [finish(process, 3).splitlines()[-1] for process in started]
    differs = (
        rf"image \(rank 0: {DIGEST}; rank 1: {DIGEST}\)"
        if decided
        else r"rank 1: image, torch: 2\.13\.0 .*2\.12\.0"
    )
    for node, sentence in enumerate(said):
        assert re.search(differs, check_refusal(tmp_path, node, sentence))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_bad_device_is_found_before_ranks_start_and_no_rank_does(tmp_path, monkeypatch):
    # The probe of a device that computes wrong: it answers in the place of the real one.
    found = json.dumps({"wrong": "its product is wrong", "nodes": {}})
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'bundle.preflight.device' in sys.orig_argv:\n"
        f"    print({'preflight found ' + found!r}, flush=True)\n"
        "    os._exit(0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    alone = (*TINY, "parallel.ep=1")
    said = finish(
        command.start_training("demo", tmp_path / "run", alone, "--preflight", "--devices-per-node=1"), 3
    ).splitlines()
    summary, violation = said[-2:]
    assert "preflight" in summary
    assert f"- {get_node_name()}: device 0: " in violation and "product" in violation
    assert not list((tmp_path / "run").rglob("rank-*.json")) and not (tmp_path / "run/metrics.jsonl").exists()
