"""The length of the sentences in pages: `python -m tools.sentences`, which `make lint` runs.

It reads README.md, CONTRIBUTING.md and docs/, without code blocks, tables and headings.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from bundle.errors import BundleError
from tools.command import run

MOST_WORDS = 30
_LIST_ITEM = re.compile(r"\s*([-*]|\d+\.)\s")
_END = re.compile(r"[.!?:][)\]*_`\"']*$")


def iterate_sentences(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line where each sentence of a page begins, counted from 1, and its words.

    A colon ends a sentence; so do a blank line and the next item of a list.
    """
    words: list[str] = []
    first, in_code = 0, False
    for number, line in enumerate(text.splitlines(), start=1):
        is_fence = line.lstrip().startswith("```")
        in_code ^= is_fence
        is_text = not (in_code or is_fence or line.startswith(("|", "#", "!", "    ")))
        if words and (not is_text or not line.strip() or _LIST_ITEM.match(line)):
            yield first, words
            words = []
        for word in line.split() if is_text else ():
            first = first if words else number
            words.append(word)
            if _END.search(word):
                yield first, words
                words = []
    if words:
        yield first, words


def find_long_sentences(root: Path) -> Iterator[str]:
    """Yield place, length and beginning of each sentence with more than MOST_WORDS words."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]
    for page in pages:
        for line, words in iterate_sentences(page.read_text(encoding="utf-8")):
            if len(words) > MOST_WORDS:
                yield f"{page.relative_to(root)}:{line}: {len(words)} words: {' '.join(words[:6])} ..."


app = typer.Typer(rich_markup_mode=None, add_completion=False, help=__doc__)


@app.command()
def check(root: Annotated[Path, typer.Option("--root", help="The checkout to read.")] = Path()) -> None:
    """Fail on every sentence that is too long."""
    if messages := list(find_long_sentences(root)):
        raise BundleError(
            f"{len(messages)} sentences have more than {MOST_WORDS} words. Split them (docs/style.md).",
            messages,
        )


if __name__ == "__main__":
    run(app, "tools.sentences")
