"""Output that nobody reads, that has no room, and a working directory that is gone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import run_bundle

pytestmark = pytest.mark.processes

VERBS = ["--help", "plan demo --mcore 0.16.1 --json", "patches list", "plan demo --nonsense", "nonsense"]


def closed_pipe() -> int:
    """The writing end of a pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("verb", VERBS)
def test_a_closed_pipe_changes_neither_the_code_nor_what_is_said(verb, tmp_path):
    heard = run_bundle(*verb.split(), cwd=tmp_path)
    writer = closed_pipe()
    unheard = run_bundle(*verb.split(), stdout=writer, cwd=tmp_path)
    nobody = run_bundle(*verb.split(), stdout=writer, stderr=writer, cwd=tmp_path)
    os.close(writer)
    assert (unheard.returncode, unheard.stderr) == (heard.returncode, heard.stderr)
    assert nobody.returncode == heard.returncode


@pytest.mark.parametrize("verb", ["--help", "plan demo --mcore 0.16.1 --json", "recipes list"])
def test_output_without_room_is_one_line_and_1(verb, tmp_path, messages):
    with Path("/dev/full").open("wb") as full:
        ran = run_bundle(*verb.split(), stdout=full, cwd=tmp_path)
    assert (ran.returncode, ran.stderr.count("\n")) == (1, 1)
    messages(ran.stderr)


def test_errors_without_room_keep_their_code(tmp_path):
    with Path("/dev/full").open("wb") as full:
        run_bundle("nonsense", stdout=full, stderr=full, cwd=tmp_path, code=2)


def test_closed_standard_streams(tmp_path):
    line = f"exec {sys.executable} -m bundle recipes list >&- 2>&-"
    assert subprocess.run(["/bin/sh", "-c", line], cwd=tmp_path, timeout=60).returncode == 0


def test_characters_that_the_locale_lacks_are_escaped(tmp_path, messages):
    ran = run_bundle("plan", "démo", environment={"PYTHONIOENCODING": "ascii"}, cwd=tmp_path, code=2)
    assert "'d\\xe9mo'" in ran.stderr
    messages(ran.stderr.splitlines()[0])


@pytest.mark.parametrize(
    "verb", ["doctor", "plan demo", "patches plan", "train demo --dry-run", "recipes list"]
)
def test_a_working_directory_that_is_gone_is_one_line_and_3(verb, tmp_path, messages):
    gone = tmp_path / "gone"
    gone.mkdir()
    line = f"rmdir {gone} && exec {sys.executable} -P -m bundle {verb}"
    ran = subprocess.run(["/bin/sh", "-c", line], cwd=gone, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr.count("\n")) == (3, 1)
    messages(ran.stderr)
