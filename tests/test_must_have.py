"""A package that must be there and is not: its tests fail where they would be skipped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WHOLE_MODULE = "import pytest\n\npytest.importorskip('lost.core')\n\ndef test_it(): pass\n"
ONE_TEST = "import pytest\n\ndef test_it(): pytest.importorskip('lost')\n"
FIXTURE = "import pytest\n\n@pytest.fixture\ndef it(): pytest.importorskip('lost')\n\ndef test_it(it): pass\n"
OTHERWISE = "import pytest\n\ndef test_it(): pytest.skip('no network: lost')\n"


def ran(folder: Path, source: str, must_have: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_some.py").write_text(source + "\ndef test_other(): pass\n")
    environment = {**os.environ, "MUST_HAVE": must_have, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-p", "tests.must_have", "-p", "no:cacheprovider", str(folder)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("source", [WHOLE_MODULE, ONE_TEST, FIXTURE])
def test_what_is_missed_fails_where_it_must_be_there(tmp_path, source):
    done = ran(tmp_path, source, "torch lost")
    assert done.returncode in (1, 2), done.stdout
    assert "MUST_HAVE names lost" in done.stdout


@pytest.mark.parametrize(
    ("source", "must_have"),
    [(ONE_TEST, ""), (WHOLE_MODULE, "torch"), (FIXTURE, "los"), (OTHERWISE, "lost")],
)
def test_anything_else_is_skipped_as_before(tmp_path, source, must_have):
    assert ran(tmp_path, source, must_have).returncode in (0, 5)


def test_ci_asks_for_what_most_tests_need():
    for file in (".ci/run", ".github/workflows/tests.yml"):
        said = next(line for line in (ROOT / file).read_text().splitlines() if "MUST_HAVE" in line)
        assert "torch" in said and "megatron" in said, file
