"""`pytest --record FILE`: what the tests have proven in which versions, for docs/compatibility.md.

A test that takes the fixture `proven` says it; the file is written where no test failed. It also has the
rows of docs/launch.md that tests gave to `record_fault`.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from bundle.environment import compatibility, packages

Proven = Callable[..., None]
RecordFault = Callable[[Mapping[str, str]], None]
_PROPERTY, _FAULT = "proven", "fault"
_SAID: pytest.StashKey[dict[tuple[str, str, str | None], list[str]]] = pytest.StashKey()
_FAULTS: pytest.StashKey[list[Mapping[str, str]]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", action="store_true", help="rewrite what the messages of rooms are")
    parser.addoption("--record", metavar="FILE", help="write what was proven in which versions")
    parser.addoption("--record-command", metavar="COMMAND", help="what it was proven by, if not this command")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_SAID], config.stash[_FAULTS] = {}, []
    config.pluginmanager.register(_Recorder(config), "record")


@pytest.fixture
def proven(record_property: Callable[[str, object], None]) -> Proven:
    """Says what this test proves where it passes; `core` is a megatron-core beside the installed one."""

    def say(what: str, *, core: str | None = None, backend: str = "cpu", device: str = "cpu") -> None:
        record_property(_PROPERTY, (backend, device, core, what))

    return say


@pytest.fixture
def record_fault(record_property: Callable[[str, object], None]) -> RecordFault:
    """Records a row of the table of faults where this test passes."""
    return lambda row: record_property(_FAULT, row)


class _Recorder:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties if report.when == "call" and report.passed else ():
            if name == _PROPERTY and isinstance(value, tuple):
                *where, what = value
                whats = self._config.stash[_SAID].setdefault(tuple(where), [])
                whats += [what] if what not in whats else []
            elif name == _FAULT and isinstance(value, Mapping):
                self._config.stash[_FAULTS].append(value)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        file, proven = self._config.getoption("--record"), self._config.stash[_SAID]
        if not file or exitstatus != pytest.ExitCode.OK:
            return
        words = [str(word) for word in self._config.invocation_params.args]
        said = self._config.getoption("--record-command")
        command = said or " ".join(["python -m pytest", *_without_record(words)])
        here = packages.detect()
        rows = [
            compatibility.build_proven_combination(
                here, backend, device, whats, command, core=core
            ).model_dump(mode="json")
            for (backend, device, core), whats in proven.items()
        ]
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        faults = self._config.stash[_FAULTS]
        document = {"combinations": rows} | ({"faults": faults} if faults else {})
        Path(file).write_text(json.dumps(document))


def _without_record(words: list[str]) -> list[str]:
    kept = [word for word in words if not word.startswith("--record=")]
    if "--record" in kept:
        at = kept.index("--record")
        del kept[at : at + 2]
    return kept
