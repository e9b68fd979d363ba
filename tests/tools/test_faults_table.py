"""The table of faults in docs/launch.md: what `make faults` wrote, and nothing that no test tries."""

import json
import re
from itertools import takewhile
from pathlib import Path

import pytest

from bundle.errors import UsageError
from tools import faults as tool

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / tool.PAGE).read_text()
ROW = {
    "target": "local",
    "fault": "a rank is killed",
    "code": "1",
    "verdict": "killed, rank 1; restart",
    "cause": "killed by SIGKILL",
    "resumed": "by the same command",
    "losses": "equal (60)",
    "processes": "none",
}
COMBINATION = {"date": "2026-01-02"}


def read_table(page: str) -> list[dict[str, str]]:
    """Return the rows of the table, read without the tool's code."""
    lines = page.partition("| target | fault |")[2].splitlines()[2:]
    rows = (line.strip("| ") for line in takewhile(lambda line: line[:1] == "|", lines))
    return [dict(zip((*ROW, "date"), re.split(r"\s+\|\s+", row), strict=True)) for row in rows]


def write_record(path: Path, *rows: dict[str, str], combinations: int = 1) -> Path:
    path.write_text(json.dumps({"combinations": [COMBINATION] * combinations, "faults": rows}))
    return path


def test_every_row_is_of_a_fault_that_a_test_tries_and_passed():
    sources = "".join(path.read_text() for path in (ROOT / "tests/faults").glob("*.py"))
    rows = read_table(PAGE)
    assert len(rows) >= 19
    for row in rows:
        assert f'"{row["fault"]}"' in sources and f'"{row["target"]}"' in sources, row
        assert (row["processes"], row["losses"][:5]) == ("none", "equal")
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])
    assert tool.replace_table(PAGE, rows) == PAGE


def test_rows_of_records_replace_the_table_in_the_order_of_targets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / tool.PAGE
    page.parent.mkdir()
    page.write_text("# A\n\n| target | fault |\n|---|---|\n| old | one |\n\nafter\n")
    newer = ROW | {"code": "75"}
    first = write_record(tmp_path / "1.json", ROW | {"target": "Ray"}, ROW | {"target": "Slurm, x"}, ROW)
    tool.write([first, write_record(tmp_path / "2.json", newer)])
    date = {"date": "2026-01-02"}
    assert read_table(page.read_text()) == [
        newer | date, ROW | date | {"target": "Slurm, x"}, ROW | date | {"target": "Ray"},
    ]  # fmt: skip
    assert page.read_text().startswith("# A\n\n| target") and page.read_text().endswith("|\n\nafter\n")


@pytest.mark.parametrize(
    "record",
    [
        lambda path: write_record(path, {"target": "local"}),
        lambda path: write_record(path, ROW | {"target": "Kubernetes"}),
        lambda path: write_record(path, ROW, combinations=0),
        lambda path: path,
    ],
    ids=["a key is missing", "an unknown target", "no versions", "no file"],
)
def test_another_file_is_no_record(record, tmp_path):
    with pytest.raises(UsageError, match=r"record\.json"):
        tool.read_rows(record(tmp_path / "record.json"))
