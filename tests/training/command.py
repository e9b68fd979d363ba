"""The command that trains, as a user gives it: a process of its own, with the package of this checkout."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bundle.launch import verdict
from tests.launch.launched import ROOT


def train(
    recipe: str, directory: Path, overrides: Iterable[str], *flags: str, **streams: Any
) -> subprocess.Popen:
    """`train RECIPE` in `directory`, begun; its output can be read, where `streams` do not say otherwise."""
    sets = (word for override in overrides for word in ("--set", override))
    command = [sys.executable, "-m", "bundle", "train", recipe, "--run-directory", str(directory), *sets]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.Popen(
        [*command, *flags], cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, text=True, **streams
    )


def finish(process: subprocess.Popen, code: int = 0) -> str:
    """What a command said, which ends with `code`; it is ended where it does not end by itself."""
    try:
        out, err = process.communicate(timeout=500)
    finally:
        process.kill()
    said = (out or "") + (err or "")
    assert process.returncode == code, said
    return said


def read_verdict(directory: Path, node: int = 0, launch: int = 1) -> dict[str, Any]:
    """The verdict on a launch of a node of the run in `directory`."""
    folder = directory / "logs" / f"node-{node}" / str(launch)
    values: dict[str, Any] = json.loads((folder / verdict.FILE_NAME).read_text())
    return values


def find_resumed_steps(said: str) -> list[int]:
    """The steps after which runs went on, by what they said."""
    return [int(step) for step in re.findall(r"after step (\d+)", said)]
