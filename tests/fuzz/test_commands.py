"""1,500 commands of wrong recipes, rows, flags, places, templates, configs and weights (`make fuzz`).

Each ends with a documented exit code, without a traceback, within 10 seconds of CPU, and leaves what it was
given as it is. The first hundred run in every `make test`; a failure names the number that makes it again.
"""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from bundle.errors import ExitCode
from tests.command import capture_bundle
from tests.fuzz.cases import make_case, write_inputs

COUNT, TOGETHER = 1500, 100
CPU_SECONDS = 10
MADE = ("runs", "made", ".tokens")  # by what is asked for: run directories, tokens beside them, caches


class TooLong(BaseException):
    """A command took more CPU than any may; no handler of the command's own takes it for an error of its."""


def _give_up(_number: int, _frame: object) -> None:
    raise TooLong


def _contents(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder by its name, but for those that a command may make."""
    found: dict[str, bytes | None] = {}
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if Path(root) != folder or name not in MADE]
        for name in (*folders, *names):
            path = Path(root, name)
            found[str(path.relative_to(folder))] = path.read_bytes() if path.is_file() else None
    return found


def _fault_of(number: int, folder: Path) -> str:
    """What is wrong with how a command ended; empty where nothing is."""
    words = make_case(number, folder)
    before, outside = _contents(folder), sorted(os.listdir("/"))  # noqa: PTH208
    begun = time.process_time()
    try:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        code, text = capture_bundle(*words)
        signal.setitimer(signal.ITIMER_PROF, 0)
    except TooLong:
        return f"more than {CPU_SECONDS} s of CPU"
    except BaseException as error:  # noqa: BLE001  whatever it is, a user would have seen it
        return f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if code not in list(ExitCode):
        return f"exit code {code}"
    if "Traceback (most recent" in text:
        return f"a traceback: {text[-300:]}"
    if (spent := time.process_time() - begun) > CPU_SECONDS:
        return f"{spent:.0f} s of CPU"
    if sorted(os.listdir("/")) != outside:  # noqa: PTH208
        return "wrote into /"
    after = _contents(folder)
    if changed := sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    ):
        return f"changed {', '.join(changed)[:300]}"
    return ""


@pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=[pytest.mark.fuzz] if first else []) for first in range(0, COUNT, TOGETHER)],
)
def test_no_command_ends_in_a_traceback_or_touches_what_it_was_given(first, tmp_path, monkeypatch):
    for name in ("HOME", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    before = signal.signal(signal.SIGPROF, _give_up)
    faults = []
    try:
        for number in range(first, first + TOGETHER):
            folder = tmp_path / str(number)
            folder.mkdir()
            monkeypatch.chdir(folder)
            write_inputs(folder)
            if fault := _fault_of(number, folder):
                faults.append(f"{number}: {make_case(number, folder)!s:.300}\n    {fault}")
            shutil.rmtree(folder)
    finally:
        signal.signal(signal.SIGPROF, before)
        monkeypatch.undo()
    assert not faults, "\n".join(faults)
    assert _contents(tmp_path) == {"HOME": None, "TMPDIR": None}, "nothing is left elsewhere"
