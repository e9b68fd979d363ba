"""The table of faults in docs/launch.md: `python -m tools.faults RECORD...`, of what `make faults` wrote."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from bundle import files
from bundle.errors import UsageError
from tools.command import run
from tools.markdown import table

PAGE = Path("docs/launch.md")
TARGETS = ("local", "Slurm", "Ray")  # in this order; a target's name may go on
# The keys of a row in a record, and the heads of their columns.
COLUMNS = {
    "target": "target",
    "fault": "fault",
    "code": "code",
    "verdict": "verdict",
    "cause": "its cause",
    "resumed": "continued",
    "losses": "losses",
    "processes": "processes left",
    "date": "date",
}

_TABLE = re.compile(r"^\| target \| fault \|.*\n(?:\|.*\n)*", re.MULTILINE)

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True, help=__doc__)


@app.command()
def write(records: Annotated[list[Path], typer.Argument(help="JSON files of `make faults`.")]) -> None:
    """Replace the table of faults in docs/launch.md; of two rows of a fault, the last one counts."""
    rows = {(row["target"], row["fault"]): row for record in records for row in read_rows(record)}
    files.write_text(PAGE, replace_table(PAGE.read_text("utf-8"), rows.values()))


def read_rows(record: Path) -> list[dict[str, str]]:
    """Return the rows of a record, with the date of its run. Raise UsageError."""
    try:
        document = json.loads(files.read_content(record, 1 << 24))
        (combination,) = document["combinations"]
        return [_check_row({**row, "date": combination["date"]}) for row in document["faults"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{record}: not a record of `make faults` ({error!r}). Run `make faults`") from None


def replace_table(page: str, rows: Iterable[Mapping[str, str]]) -> str:
    """Return a page with these rows as its table of faults."""
    ordered = sorted(rows, key=lambda row: TARGETS.index(row["target"].partition(",")[0]))
    made = table(COLUMNS.values(), ([row[key] for key in COLUMNS] for row in ordered))
    return _TABLE.sub(lambda _: made, page, count=1)


def _check_row(row: dict[str, Any]) -> dict[str, str]:
    if set(row) != set(COLUMNS) or row["target"].partition(",")[0] not in TARGETS:
        raise ValueError(row)
    return row


if __name__ == "__main__":
    run(app, "tools.faults")
