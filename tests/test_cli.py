"""The command line as a user meets it."""

import subprocess
import sys


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "bundle", *args], capture_output=True, text=True, timeout=60)


def test_help_names_the_program():
    result = run("--help")
    assert result.returncode == 0
    assert "Megatron-Core" in result.stdout


def test_unknown_verb_is_a_usage_error():
    assert run("nonsense").returncode == 2
