"""`mcore-bundle doctor` as a user meets it, and the packages named bundle."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import bundle
from bundle.environment.doctor import SUPPORTED_MEGATRON, check_interpreter, examine
from bundle.environment.machine import Level
from bundle.environment.search import build_search_path
from tests.environment.machines import recorded
from tests.environment.trees import install_megatron, install_torch, stack_of

OWN = Path(bundle.__file__).parent


def doctor(*args, cwd, codes):
    """Runs the command as the installed script does: its first path entry is the directory of scripts."""
    scripts = cwd / "scripts"
    scripts.mkdir()
    (scripts / "mcore-bundle").write_text("from bundle.cli import main\nmain()\n")
    command = [sys.executable, str(scripts / "mcore-bundle"), "doctor", *args]
    environ = {**os.environ, "PYTHONPATH": str(OWN.parent)}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout


def test_json_is_one_object(tmp_path):
    # 3 where this environment has no megatron-core
    report = json.loads(doctor("--json", "--backend", "cpu", cwd=tmp_path, codes=(0, 3)))
    assert report["schema"] == 1
    assert report["hardware"]["backend"] == "cpu"
    assert {finding["level"] for finding in report["findings"]} <= {"ok", "warn", "fail"}


def test_a_foreign_bundle_in_the_current_directory_is_refused(tmp_path):
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle/__init__.py").touch()
    said = doctor("--backend", "cpu", cwd=tmp_path, codes=(3,))
    lines = said.splitlines()
    (line,) = [line for line in lines if line.startswith("fail  bundle")]
    assert str(tmp_path / "bundle") in line
    assert lines[lines.index(line) + 1].strip().startswith("fix: ")


def test_an_absent_backend_is_unfit(tmp_path):
    assert "backend ascend" in doctor("--backend", "ascend", cwd=tmp_path, codes=(3,))


def test_an_unknown_backend_is_a_usage_error(tmp_path):
    doctor("--backend", "tpu", cwd=tmp_path, codes=(2,))


@pytest.mark.parametrize("name", ["bundle", "bundle.py"])
@pytest.mark.parametrize(("first", "level"), [(True, Level.FAIL), (False, Level.WARN)])
def test_which_bundle_comes_first_decides(tmp_path, name, first, level):
    foreign = tmp_path / name
    if name == "bundle":
        foreign.mkdir()
        (foreign / "__init__.py").touch()
    else:
        foreign.touch()
    paths = [str(tmp_path), str(OWN.parent)]
    path = build_search_path(paths if first else paths[::-1], "", tmp_path)
    (finding,) = [f for f in check_interpreter((3, 11), path, OWN) if f.subject == "bundle"]
    assert finding.level is level
    assert str(foreign) in finding.cause


def test_an_old_python_is_refused():
    findings = list(check_interpreter((3, 10), build_search_path([str(OWN.parent)], "", OWN), OWN))
    assert findings[0].level is Level.FAIL
    assert "3.10 is older than 3.11" in findings[0].cause


def test_two_accelerators_are_findings_not_a_crash(tmp_path):
    install_torch(tmp_path)
    install_megatron(tmp_path)
    environ = {"CUDA_VISIBLE_DEVICES": "0,0"}
    hardware, findings = examine(recorded("h200-x2", environ), stack_of(OWN.parent, tmp_path))
    assert hardware is None
    assert any(f.level is Level.FAIL and "CUDA_VISIBLE_DEVICES=0,0" in f.cause for f in findings)


def test_every_extra_installs_the_supported_range_of_megatron_core():
    project = tomllib.loads((Path(bundle.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    oldest, beyond = SUPPORTED_MEGATRON
    for extra in ("cpu", "cuda", "ascend"):
        assert f"megatron-core>={oldest},<{beyond}" in project["optional-dependencies"][extra]
