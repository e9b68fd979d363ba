"""The golden files of messages: what they hold, how they are read, and that no entry outlives its test."""

from pathlib import Path

import pytest

from tests.golden import NAME, TESTS, is_current, normalise, read_entries, write_entries

FILES = sorted(TESTS.rglob(NAME))


@pytest.mark.parametrize("file", FILES, ids=[file.parent.name for file in FILES])
def test_every_entry_has_its_test_and_the_file_is_sorted(file: Path, tmp_path: Path):
    entries = read_entries(file)
    assert [head for head in entries if not is_current(file.parent, head)] == []
    write_entries(tmp_path / NAME, entries)
    assert (tmp_path / NAME).read_text() == file.read_text()


def test_entries_are_read_as_they_were_written(tmp_path: Path):
    entries = {"test_b.py::test_x[1]": ["one", "two\n  - a violation\n    deeper"], "test_a.py::test_y": [""]}
    write_entries(tmp_path / NAME, entries)
    assert read_entries(tmp_path / NAME) == entries


def test_what_differs_from_run_to_run_is_left_out(tmp_path: Path):
    text = f"{tmp_path}/x: pid 4711 has 0x7f00deadbeef  \n\n  - next"
    assert normalise(text, {"TMP": tmp_path}) == "TMP/x: pid PID has 0xADDRESS\n  - next"
