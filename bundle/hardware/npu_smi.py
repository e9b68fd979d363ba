"""Reads the table of `npu-smi info`, whose columns and widths change with version and product.

One device is one pair of rows. Seen: npu-smi 24.1 to 26.0 on A2 (no Phy-ID column), A3 (two chips per NPU id,
the second without power), and 310 cards (`Device` instead of `Phy-ID`, no HBM column).
"""

import re

from bundle.frozen import frozen
from bundle.hardware.facts import NUMBER

_USAGE = rf"({NUMBER})\s*/\s*({NUMBER})"


@frozen
class Row:
    """One device of the table; `number` is the Phy-ID (or Device), None where that column is absent or says
    NA.
    """

    npu: int
    chip: int
    number: int | None
    name: str
    health: str
    bus: str
    memory: int | None  # MiB


def parse(text: str) -> tuple[Row, ...]:
    """The devices of an `npu-smi info` table in its own order; none if the text is no such table."""
    rows: list[Row] = []
    numbered = False
    above: list[str] | None = None  # the first row of a pair
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3 or not line.lstrip().startswith("|"):
            above = None  # a rule, the version line, or the process table
        elif cells[0].startswith("Chip"):
            numbered = len(cells[0].split()) > 1
            above = None
        elif above is None:
            above = cells if re.match(rf"{NUMBER}\s+\S", cells[0]) else None
        else:
            row = _pair(above, cells, numbered)
            rows += [row] if row else []
            above = None
    return tuple(rows)


def _pair(above: list[str], below: list[str], numbered: bool) -> Row | None:
    npu, name = above[0].split(maxsplit=1)
    ids = below[0].split()
    if not ids or not re.fullmatch(NUMBER, ids[0]):
        return None
    number = int(ids[1]) if numbered and len(ids) > 1 and re.fullmatch(NUMBER, ids[1]) else None
    # DDR comes before HBM; 310 cards have the first only. The last pair is the memory that tensors live in.
    usage = re.findall(_USAGE, below[2])
    memory = int(usage[-1][1]) if usage else None
    return Row(int(npu), int(ids[0]), number, name, above[1], below[1], memory or None)


def version(text: str) -> str | None:
    """The version that the header line gives: `npu-smi 25.2.1   Version: 25.2.1`."""
    match = re.search(r"Version:\s*([^\s|]+)", text)
    return match[1] if match else None
