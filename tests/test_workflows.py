"""The workflows: by their schema, by a security linter, and by the rules of this project."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

FILES = sorted((Path(__file__).parents[1] / ".github/workflows").glob("*.yml"))
READING = {"contents": "read"}


def tool(name):
    """The program of a linter, which pip installs beside this interpreter."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    return found or pytest.skip(f"{name} is not installed: pip install '.[dev]'")


def jobs():
    for file in FILES:
        for name, job in YAML(typ="safe", pure=True).load(file)["jobs"].items():
            yield pytest.param(job, id=f"{file.stem}-{name}")


def test_there_are_workflows():
    assert [file.stem for file in FILES] == ["images", "tests"]


def test_the_schema():
    command = [tool("check-jsonschema"), "--builtin-schema", "vendor.github-workflows", *FILES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_security_linter():
    command = [tool("zizmor"), "--offline", "--no-progress", *FILES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_action_is_pinned_by_commit_and_says_its_version(file):
    used = re.findall(r"uses: (.*)", file.read_text())
    assert used
    for line in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[0-9.]+", line), line


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_nothing_is_permitted_that_no_job_asks_for(file):
    assert YAML(typ="safe", pure=True).load(file)["permissions"] == {}


@pytest.mark.parametrize("job", list(jobs()))
def test_a_job_ends_and_only_a_push_may_write(job):
    assert job["timeout-minutes"] <= 350
    pushes = "event_name == 'push'" in job.get("if", "") or "publish" in job.get("needs", [])
    assert job["permissions"] == (READING | {"packages": "write"} if pushes else READING)
    secret = "secrets." in str(job)
    assert secret <= pushes
