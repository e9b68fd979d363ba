"""The command line as a user meets it."""

import subprocess
import sys

from bundle import __version__
from bundle.cli import VERBS


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "bundle", *args], capture_output=True, text=True, timeout=60)


def test_help_names_the_program():
    result = run("--help")
    assert result.returncode == 0
    assert "Megatron-Core" in result.stdout


def test_the_version_is_the_package_s():
    assert run("--version").stdout == f"mcore-bundle {__version__}\n"


def test_no_verb_is_a_usage_error_that_lists_them():
    result = run()
    assert result.returncode == 2
    assert result.stderr == run("--help").stdout


def test_unknown_verb_is_a_usage_error_that_names_those_there_are():
    result = run("nonsense")
    assert result.returncode == 2
    assert "no verb 'nonsense'" in result.stderr
    assert all(f"- {verb}: " in result.stderr for verb in VERBS)


def test_a_verb_s_help_names_the_whole_command():
    result = run("patches", "plan", "--help")
    assert result.returncode == 0
    assert result.stdout.startswith("Usage: mcore-bundle patches plan [OPTIONS]")
