"""What a launcher looks at before it hands a job over: the run directory, and what the job reads."""

import subprocess
import sys
from pathlib import Path

import pytest

CLIENTS = {"slurm": "sbatch", "docker": "docker", "ray": ""}
ADDRESS = {"ray": ("--address=http://127.0.0.1:9",)}  # a port where nobody answers


def launched(folder: Path, target: str, *words: str) -> subprocess.CompletedProcess[str]:
    """`launch TARGET demo` with a client on the PATH that writes down that it was asked, and fails."""
    clients = folder / "clients"
    clients.mkdir()
    if CLIENTS[target]:
        client = clients / CLIENTS[target]
        client.write_text(f"#!/bin/sh\necho asked >>{folder}/asked\nexit 1\n")
        client.chmod(0o755)
    command = [sys.executable, "-m", "bundle", "launch", target, "demo", "--backend=cpu", "-d", *words]
    return subprocess.run(
        [*command, *ADDRESS.get(target, ()), "--run-directory=run"],
        cwd=folder,
        env={"PATH": f"{clients}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


def was_asked(folder: Path, done: subprocess.CompletedProcess[str]) -> bool:
    return (folder / "asked").exists() or "127.0.0.1:9" in done.stderr


@pytest.mark.parametrize("target", CLIENTS)
def test_a_run_directory_that_is_not_the_jobs_is_refused_before_anybody_is_asked(target, tmp_path):
    (tmp_path / "run/checkpoints/somebody's").mkdir(parents=True)
    done = launched(tmp_path, target)
    assert done.returncode == 2 and "holds checkpoints, but no recipe.yaml" in done.stderr, done.stderr
    assert not was_asked(tmp_path, done)


@pytest.mark.parametrize("target", CLIENTS)
def test_data_that_is_not_there_is_refused_and_said_where_an_image_may_have_it(target, tmp_path):
    missing = "--set=data.path=[nowhere.txt]"
    done = launched(tmp_path, target, missing)
    assert "nowhere.txt" in done.stderr
    if target == "docker":
        assert "the image, or what is mounted, may have it" in done.stderr
        assert was_asked(tmp_path, done)
    else:
        assert done.returncode == 2 and not was_asked(tmp_path, done)


def test_what_would_be_submitted_is_shown_on_a_machine_without_the_data(tmp_path):
    done = launched(tmp_path, "slurm", "--set=data.path=[nowhere.txt]", "--dry-run")
    assert done.returncode == 0 and done.stdout.startswith("#!/bin/bash"), done.stderr


QUEUES = ("slurm", "kubernetes", "ray")


@pytest.mark.parametrize("target", [*QUEUES, "docker"])
def test_a_queue_is_handed_epochs_with_a_word_on_what_is_not_known_of_them(target, tmp_path):
    def said(*words: str) -> int:
        command = [sys.executable, "-m", "bundle", "launch", target, "demo", "--backend=cpu", "--dry-run"]
        done = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found = (
            "how many steps 1.5 epochs are is not known before the data is read; `mcore-bundle check demo`"
        )
        return done.stderr.count(found)

    assert said("--set=train.steps=null", "--set=train.epochs=1.5") == (target in QUEUES)
    assert said() == 0
