"""`pytest --record`: a session without failures leaves what it has proven, any other leaves nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest
from tests.record import *

@pytest.mark.parametrize("case", [1, 2])
def test_it(case, proven):
    proven("it", core="0.98.0")
    proven("it", core="0.99.0", backend="ascend", device="emulated")

def test_other(proven, record_fault):
    proven("more", core="0.98.0")
    record_fault({"fault": "a rank is killed"})
    assert {good}

def test_quiet(): pass
"""


def recorded(folder: Path, good: bool, *said: str) -> Path:
    (folder / "conftest.py").write_text(
        "from tests.record import proven, pytest_addoption, pytest_configure, record_fault\n"
    )
    (folder / "test_some.py").write_text(TESTS.replace("{good}", str(good)))
    file = folder / "records/record.json"
    command = [sys.executable, "-m", "pytest", "-q", "--record", str(file), "-p", "no:cacheprovider"]
    command += [*said, "."]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == (0 if good else 1), ran.stdout + ran.stderr
    return file


def test_what_was_proven_is_written_once_with_the_versions(tmp_path):
    pytest.importorskip("torch")
    from importlib.metadata import version

    document = json.loads(recorded(tmp_path, True).read_text())
    assert document["faults"] == [{"fault": "a rank is killed"}]
    rows = document["combinations"]
    said = {row["packages"]["megatron-core"]: row for row in rows}
    assert said["0.98.0"]["proven"] == ["it", "more"] and said["0.99.0"]["proven"] == ["it"]
    assert (said["0.99.0"]["backend"], said["0.99.0"]["device"]) == ("ascend", "emulated")
    assert all(row["packages"]["torch"] == version("torch") for row in rows)
    assert said["0.98.0"]["command"] == "python -m pytest -q -p no:cacheprovider ."
    rows = json.loads(recorded(tmp_path, True, "--record-command", "make it").read_text())["combinations"]
    assert {row["command"] for row in rows} == {"make it"}


def test_nothing_is_written_where_a_test_failed(tmp_path):
    assert not recorded(tmp_path, False).exists()
