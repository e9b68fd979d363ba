"""The messages of a room, once: tests/ROOM/messages.golden; `make golden` (`pytest --golden`) rewrites it.

A test takes the fixture `messages` and records each message; it asserts codes, keys and values itself.
"""

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.must_have import HAS_PASSED

TESTS = Path(__file__).parent
NAME = "messages.golden"
Entries = dict[str, list[str]]
# What differs from run to run is not part of a message's wording.
VARYING = [(re.compile(r"0x[0-9a-f]{6,}"), "0xADDRESS"), (re.compile(r"\bpid \d+"), "pid PID")]


def read_entries(file: Path) -> Entries:
    """Return the messages by test, `test_x.py::test_name[case]`."""
    blocks = file.read_text().rstrip("\n").split("\n\n") if file.exists() else []
    entries: Entries = {}
    for block in blocks:
        head, *lines = block.split("\n")
        messages = entries.setdefault(head, [])
        for line in lines:
            if line.startswith("  - "):
                messages.append(line[4:])
            else:
                messages[-1] += "\n" + line[4:]
    return entries


def write_entries(file: Path, entries: Entries) -> None:
    """Write the messages sorted by test, a block each."""
    blocks = []
    for head in sorted(entries):
        lines = [f"  - {message}".replace("\n", "\n    ") for message in entries[head]]
        blocks.append("\n".join([head, *lines]))
    partial = file.with_suffix(".partial")
    partial.write_text("\n\n".join(blocks) + "\n")
    partial.replace(file)


def find_room(path: Path) -> Path:
    """Return the folder below tests/ that has the test; tests/ itself for a file that lies in it."""
    below = path.relative_to(TESTS).parts
    return TESTS / below[0] if len(below) > 1 else TESTS


def normalise(message: str, folders: dict[str, Path]) -> str:
    """Return the message without paths, addresses, process numbers and empty lines."""
    for name, folder in folders.items():
        message = message.replace(str(folder), name)
    for pattern, name in VARYING:
        message = pattern.sub(name, message)
    return "\n".join(line.rstrip() for line in message.splitlines() if line.strip())


def is_current(room: Path, head: str) -> bool:
    """Return whether the test of an entry still exists."""
    file, _, test = head.partition("::")
    name = test.partition("[")[0]
    return (room / file).exists() and f"def {name}(" in (room / file).read_text()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave only the tests that record messages where the golden files are rewritten."""
    if config.getoption("--golden"):
        items[:] = [item for item in items if "messages" in getattr(item, "fixturenames", ())]


@pytest.fixture
def messages(request: pytest.FixtureRequest) -> Iterator[Callable[[object], None]]:
    """Record a message of this test; at its end, all of them must be those of the golden file."""
    tmp = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    folders = ({"TMP": tmp} if tmp else {}) | {"REPOSITORY": TESTS.parent}
    recorded: list[str] = []
    yield lambda message: recorded.append(normalise(str(message), folders))
    if not request.node.stash.get(HAS_PASSED, False):
        return
    room = find_room(request.path)
    head = f"{request.path.relative_to(room)}::{request.node.name}".encode("unicode_escape").decode()
    if not request.config.getoption("--golden"):
        assert recorded == read_entries(room / NAME).get(head, []), (
            f"{head}: run `make golden` and read the diff"
        )
        return
    lock = os.open(room, os.O_RDONLY)  # several processes run the tests of one room
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = read_entries(room / NAME) | {head: recorded}
        current = {head: entries[head] for head in entries if entries[head] and is_current(room, head)}
        write_entries(room / NAME, current)
    finally:
        os.close(lock)
