"""Who starts a job is told what `check` says of its disk, where that has not the room."""

import logging
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bundle.checkpoints.directory import CheckpointDirectory
from bundle.cli import train
from bundle.planning.output import format_disk
from bundle.planning.size import estimate_checkpoint_export_disk
from bundle.recipe import load
from bundle.runs.directory import RunDirectory
from tests.command import run_bundle

Usage = namedtuple("Usage", "total used free")
MANY = "--set=checkpoint.keep=1000000000"


@pytest.mark.parametrize("target", ["slurm", "docker", "ray", "local"])
@pytest.mark.parametrize("keep", [MANY, ""])
def test_a_launch_that_sees_the_run_directory_says_whether_its_disk_has_the_room(target, keep, tmp_path):
    words = ["launch", target, "demo", "--backend=cpu", "--detach", *([keep] if keep else [])]
    words += ["--run-directory=run"]
    words += {"ray": ["--address=http://127.0.0.1:9"], "local": ["--dry-run"]}.get(target, [])
    done = run_bundle(*words, cwd=tmp_path, base={"PATH": "/nowhere"})
    found = [line for line in done.stderr.splitlines() if "disk: " in line]
    assert len(found) == (1 if keep else 0), done.stderr
    for line in found:
        needed = estimate_checkpoint_export_disk(
            load("demo", [keep.removeprefix("--set=")]), tmp_path / "run"
        )
        assert format_disk(needed, tmp_path / "run").partition(";")[0] in line
        assert "NOT ENOUGH" in line and "checkpoint.keep" in line and f" {tmp_path}/run" in line


@pytest.mark.parametrize(("node", "keep"), [(0, MANY), (1, MANY), (0, "")])
def test_train_says_it_on_the_first_node_and_starts_the_ranks(node, keep, tmp_path, monkeypatch, caplog):
    started: list[object] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "_run_ranks", lambda *words, **_: started.append(words))
    where = ["--nodes=2", f"--node-rank={node}", "--rendezvous=host:1"]
    with caplog.at_level(logging.WARNING):
        done = CliRunner().invoke(train.app, ["demo", *where, *([keep] if keep else [])])
    assert done.exit_code == 0 and len(started) == 1, done.output
    assert caplog.text.count("NOT ENOUGH") == (1 if keep and node == 0 else 0)


def test_what_a_run_has_written_needs_no_room_again(tmp_path, monkeypatch):
    recipe = load("demo", ["checkpoint={keep: 3, export: hf, export_interval: 10}", "train.steps=40"])
    fresh = estimate_checkpoint_export_disk(recipe, tmp_path)
    export = fresh.exports // 4
    run = RunDirectory(tmp_path / "run")

    def fits(free: int) -> bool:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, free))
        return run.estimate_disk(recipe).is_sufficient

    for steps in ((10, 20, 30), (10, 20, 30, 35, 36)):
        for step in steps:
            CheckpointDirectory(run.checkpoints).get_path(step).mkdir(parents=True, exist_ok=True)
        left = fresh.checkpoint * max(0, 4 - len(steps)) + 2 * export
        for step in (10, 20):
            run.build_export_path("hf", step).mkdir(exist_ok=True)
        assert fits(left) and not fits(left - 1)


def test_epochs_whose_steps_are_not_known_have_one_export_at_least():
    words = ["checkpoint={export: hf, export_interval: 10}", "train.steps=null", "train.epochs=3"]
    once = estimate_checkpoint_export_disk(load("demo", ["checkpoint.export=hf"]), Path())
    assert estimate_checkpoint_export_disk(load("demo", words), Path()).exports == once.exports > 0
