"""What a launcher looks at before it hands a job over: the run directory, and what the job reads."""

import subprocess
from pathlib import Path

import pytest

from tests.command import run_bundle
from tests.targets.stderr import drop_times

CLIENTS = {"slurm": "sbatch", "docker": "docker", "ray": ""}
ADDRESS = {"ray": ("--address=http://127.0.0.1:9",)}  # a port where nobody answers


def launched(folder: Path, target: str, *words: str) -> subprocess.CompletedProcess[str]:
    """`launch TARGET demo` with a client on the PATH that writes down that it was asked, and fails."""
    folder.chmod(0o755)  # the container of root is another user's
    clients = folder / "clients"
    clients.mkdir()
    if CLIENTS[target]:
        client = clients / CLIENTS[target]
        client.write_text(f"#!/bin/sh\necho asked >>{folder}/asked\nexit 1\n")
        client.chmod(0o755)
    options = ("--backend=cpu", "-d", *words, *ADDRESS.get(target, ()), "--run-directory=run")
    path = f"{clients}:/usr/bin:/bin"
    return run_bundle("launch", target, "demo", *options, cwd=folder, environment={"PATH": path})


def was_asked(folder: Path, done: subprocess.CompletedProcess[str]) -> bool:
    return (folder / "asked").exists() or "127.0.0.1:9" in done.stderr


@pytest.mark.parametrize("target", CLIENTS)
def test_a_run_directory_that_is_not_the_jobs_is_refused_before_anybody_is_asked(target, tmp_path, messages):
    (tmp_path / "run/checkpoints/somebody's").mkdir(parents=True)
    done = launched(tmp_path, target)
    assert done.returncode == 2 and "recipe.yaml" in done.stderr, done.stderr
    assert not was_asked(tmp_path, done)
    messages(next(line for line in done.stderr.splitlines() if "recipe.yaml" in line))


@pytest.mark.parametrize("target", CLIENTS)
def test_data_that_is_not_there_is_refused_and_said_where_an_image_may_have_it(target, tmp_path, messages):
    missing = "--set=data.path=[nowhere.txt]"
    done = launched(tmp_path, target, missing)
    (line,) = (line for line in done.stderr.splitlines() if "nowhere.txt" in line)
    messages(drop_times(line.strip()))
    if target == "docker":
        assert was_asked(tmp_path, done)
    else:
        assert done.returncode == 2 and not was_asked(tmp_path, done)


def test_what_would_be_submitted_is_shown_on_a_machine_without_the_data(tmp_path):
    done = launched(tmp_path, "slurm", "--set=data.path=[nowhere.txt]", "--dry-run")
    assert done.returncode == 0 and done.stdout.startswith("#!/bin/bash"), done.stderr


QUEUES = ("slurm", "kubernetes", "ray")


@pytest.mark.parametrize("target", [*QUEUES, "docker"])
def test_a_queue_is_handed_epochs_with_a_word_on_what_is_not_known_of_them(target, tmp_path, messages):
    def find_warnings(*words: str) -> list[str]:
        command = ("launch", target, "demo", "--backend=cpu", "--dry-run", *words)
        done = run_bundle(*command, cwd=tmp_path, code=0)
        return [line for line in done.stderr.splitlines() if "epochs" in line]

    warnings = find_warnings("--set=train.steps=null", "--set=train.epochs=1.5")
    assert len(warnings) == (target in QUEUES) and all("train.epochs: 1.5" in line for line in warnings)
    for warning in warnings:
        messages(drop_times(warning))
    assert find_warnings() == []
