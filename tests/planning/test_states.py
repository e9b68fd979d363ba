"""Predicted tensors and bytes are those of real models, wrappers and optimizers, on every rank."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[2]


def build(tree):
    given = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(str(part) for part in (ROOT, tree, given) if part)
    command = [sys.executable, "-W", "ignore", "-m", "tests.planning.builder"]
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


@pytest.mark.world
def test_default_release():
    pytest.importorskip("megatron.core")
    seen = build(None)
    assert seen["wrong"] == []
    assert seen["ranks"] > 50


@pytest.mark.releases
def test_newest_release_of_every_minor(release_trees):
    newest = {Version(version).release[:2]: version for version in release_trees}
    found = {version: build(release_trees[version]) for version in newest.values()}
    assert {version: seen["wrong"] for version, seen in found.items() if seen["wrong"]} == {}
    assert all(seen["ranks"] > 30 for seen in found.values())
