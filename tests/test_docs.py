"""Every command that a page shows runs: training as far as --dry-run, make as far as make -n."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.command import run_bundle

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)

# These need weights: tests.cli.test_weights, test_generate and test_building and tests.journeys have some.
WITH_WEIGHTS = ("weights", "generate", "sft", "dpo", "pretrain", "init")


def commands() -> list[tuple[str, str]]:
    """(page, command) of every line after a prompt in a console block; comments are left out."""
    found = []
    for page in PAGES:
        for block in CONSOLE.findall(page.read_text(encoding="utf-8")):
            prompts = [line[2:] for line in block.splitlines() if line.startswith("$ ")]
            shown = (line.partition("#")[0].strip() for line in prompts)
            found += [(page.name, line) for line in shown if line.split()[1] not in WITH_WEIGHTS]
    return found


@pytest.mark.parametrize(("page", "command"), commands())
def test_a_shown_command_runs(page, command, tmp_path):
    program, *words = shlex.split(command)
    if program == "make":
        words = ["-n", *words]
        result = subprocess.run(["make", *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    elif program == "mcore-bundle":
        if words[0] == "train" and "--dry-run" not in words:
            words.append("--dry-run")
        result = run_bundle(*words, cwd=tmp_path, timeout=60)
    else:
        pytest.fail(f"{page} shows `{program}`, which no test can run: show make or mcore-bundle")
    # 3: doctor found something on this machine; 4: the audit found a silent defect, as it does in any release
    allowed = {0, 3} if "doctor" in words else {0, 4} if "audit" in words else {0}
    assert result.returncode in allowed, result.stdout + result.stderr


def test_pages_show_commands():
    assert len(commands()) >= 8
