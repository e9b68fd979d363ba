"""What the generated pages have in common."""

from collections.abc import Iterable


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table as Markdown, with a blank line behind it."""
    columns = list(head)
    lines = [_line(columns), "|" + "---|" * len(columns), *map(_line, rows)]
    return "\n".join([*lines, ""])


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
