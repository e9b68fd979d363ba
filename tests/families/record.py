"""What runs have shown of each family: kept in a file, of which docs/models.md is made.

Tests note what they have seen when they have passed, in a run for which $FAMILIES_RECORD names the file:
FAMILIES_RECORD=tests/families/record.json python -m pytest tests/families tests/models tests/reference
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from tools.models import RECORD

# release -> family -> what was held against transformers -> how far it was off at most
Record = dict[str, dict[str, dict[str, float]]]


def read(path: Path = RECORD) -> Record:
    """The record; empty where there is none yet."""
    found: Record = json.loads(path.read_text()) if path.exists() else {}
    return found


def note(release: str, what: str, seen: Mapping[str, float]) -> None:
    """Keeps `seen`, by family, as what this run has shown; nothing where no run is for the record."""
    if not (name := os.environ.get("FAMILIES_RECORD")):
        return
    path = Path(name)
    record = read(path)
    for family, distance in seen.items():
        record.setdefault(release, {}).setdefault(family, {})[what] = float(f"{distance:.0e}")
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
