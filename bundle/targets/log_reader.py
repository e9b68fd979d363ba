"""A log that a job writes, shown while it grows."""

from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator
from pathlib import Path

from bundle import files


def tail_log(paths: Iterable[Path | None]) -> Iterator[str]:
    """What a file got between two looks at it; `paths` names it at each, or None while there is none."""
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
