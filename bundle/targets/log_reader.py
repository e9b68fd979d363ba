"""Reading of a log while a job writes it."""

from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator
from pathlib import Path

from bundle import files


def read_appended_text(paths: Iterable[Path | None]) -> Iterator[str]:
    """Yield what was appended to a file between two reads.

    `paths` gives the file's path before each read, or None while there is no file.
    """
    offset, decoder = 0, getincrementaldecoder("utf-8")("replace")
    for path in paths:
        if path is None or not files.is_file(path):
            continue
        with path.open("rb") as file:
            file.seek(offset)
            new = file.read()
        offset += len(new)
        if text := decoder.decode(new):
            yield text
