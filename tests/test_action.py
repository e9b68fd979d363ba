"""The GitHub Action and the pre-commit hook that call the audit: their schema, a linter, what they run."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.command import run_bundle
from tests.test_workflows import tool

ROOT = Path(__file__).parents[1]
ACTION, HOOKS = ROOT / "action.yml", ROOT / ".pre-commit-hooks.yaml"
PAGE = (ROOT / "docs/audit.md").read_text("utf-8")


def loaded(file: Path) -> Any:
    return YAML(typ="safe", pure=True).load(file)


@pytest.mark.parametrize(
    "command",
    [
        ("check-jsonschema", "--builtin-schema", "vendor.github-actions"),
        ("zizmor", "--offline", "--no-progress"),
    ],
    ids=lambda command: command[0],
)
def test_the_action_is_well_formed_and_safe(command: tuple[str, ...]):
    done = subprocess.run(
        [tool(command[0]), *command[1:], ACTION], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def step(tmp: Path, code: int, **inputs: str) -> str:
    """What the action's last step prints, run as GitHub does, with mcore-bundle where the first puts it."""
    program = tmp / "mcore-bundle/bin/mcore-bundle"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m bundle "$@"\n')
    program.chmod(0o755)
    described = loaded(ACTION)
    last = described["runs"]["steps"][-1]
    values = {name: inputs.get(name, of["default"]) for name, of in described["inputs"].items()}
    given = {key: values[value.split("inputs.")[1].split()[0]] for key, value in last["env"].items()}
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", last["run"]],
        env={**os.environ, "RUNNER_TEMP": str(tmp), **given},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_the_action_fails_where_a_silent_defect_reaches(tmp_path: Path):
    assert "PRESENT      mtp-packed-roll-boundaries" in step(
        tmp_path, 4, mcore="0.17.1", features="mtp,packed"
    )


def test_the_action_passes_where_none_does(tmp_path: Path):
    assert "0 present" in step(tmp_path, 0, mcore="0.19.2", features="pp,packed")


def test_the_hook_calls_a_program_of_ours_once():
    (hook,) = loaded(HOOKS)
    assert hook["language"] == "python" and hook["always_run"] and not hook["pass_filenames"]
    program, *words = hook["entry"].split()
    assert f'{program} = "bundle.cli:main"' in (ROOT / "pyproject.toml").read_text()
    run_bundle(*words, "--mcore", "0.19.2", "--features", "pp", cwd=ROOT, code=0)


def test_the_page_shows_inputs_and_hooks_that_there_are():
    shown = [line.split(":")[0].strip() for line in PAGE.split("with:\n")[1].split("```")[0].splitlines()]
    assert shown and set(shown) <= set(loaded(ACTION)["inputs"])
    assert f"- id: {loaded(HOOKS)[0]['id']}" in PAGE
