"""Draws docs/demo.svg: what a terminal shows at the end of a real run of the demo.

python -m benchmarks.picture [FILE] [--set KEY=VALUE]...
"""

import argparse
import os
import pty
import re
import sys
from io import StringIO
from pathlib import Path

import pyte
from pyte.screens import Char
from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 100, 24
SHOWN = "mcore-bundle train demo"


def main() -> None:
    """Trains, then writes the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, default=Path("docs/demo.svg"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    chosen = parser.parse_args()
    overrides = [word for one in chosen.set for word in ("--set", one)]
    screen = run([sys.executable, "-m", "bundle", "train", "demo", "--fresh", *overrides])
    chosen.file.write_text(draw([f"$ {' '.join([SHOWN, *overrides])}", *lines(screen)]))


def run(command: list[str]) -> pyte.Screen:
    """What a terminal shows when the command has ended; raises SystemExit where it fails."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    process, terminal = pty.fork()
    if process == 0:
        shape = {"COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm-256color"}
        os.execve(command[0], command, os.environ | shape)
    while written := read(terminal):
        stream.feed(written)
    if code := os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
        raise SystemExit("\n".join([*screen.display, f"ended with {code}"]))
    return screen


def read(terminal: int) -> bytes:
    """The next output; nothing when the other side is closed, which Linux calls an error."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def lines(screen: pyte.Screen) -> list[Text]:
    """The rows of a screen, without the empty ones at its end."""
    rows = [
        Text.assemble(*((cell.data, style(cell)) for cell in (screen.buffer[row][x] for x in range(COLUMNS))))
        for row in range(ROWS)
    ]
    while rows and not rows[-1].plain.strip():
        rows.pop()
    return rows


def style(cell: Char) -> str:
    """Its colour as rich names it."""
    if cell.fg == "default":
        return ""
    return f"#{cell.fg}" if re.fullmatch("[0-9a-f]{6}", cell.fg) else cell.fg.replace("brown", "yellow")


def draw(rows: list[str | Text]) -> str:
    """The rows as SVG, in a font that the reader has: a picture loads nothing."""
    console = Console(record=True, width=COLUMNS, file=StringIO())
    for row in rows:
        console.print(row, highlight=False)
    return re.sub(r"@font-face \{.*?\}", "", console.export_svg(title=SHOWN), flags=re.DOTALL)


if __name__ == "__main__":
    main()
