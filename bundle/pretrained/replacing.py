"""A directory that is written whole or not at all, in the place of what has its name, where that may be.

Beside what is written lies a list of it: what is replaced unasked holds nothing else.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bundle import files
from bundle.errors import UsageError

LIST = ".written-by-mcore-bundle"  # the files of a directory that was written here, a name a line


def refuse(directory: Path, sources: Iterable[Path], *, force: bool) -> None:
    """Raises UsageError where writing `directory` would take what is read, or what was not written here.

    `force` has a directory of anybody's replaced, but no source.
    """
    place = _resolved(directory)
    for source in sources:
        read = source.resolve()
        if place.is_relative_to(read) or read.is_relative_to(place):
            raise UsageError(f"{directory} is, holds or lies in {source}, which is read: name another one")
    if not force and place.exists() and (others := _not_written_here(place)):
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise UsageError(
            f"{directory} holds {files.printable(others[0])}{more}, which was not exported or imported to it:"
            " name another directory, or have all of it replaced with --force"
        )


@contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """An empty folder to write into, which becomes `directory` when the block ends without an error.

    Of a link what it names is replaced. Whoever is killed before the end leaves `.NAME.partial`, which the
    next one removes; between the two renames at the end what was there is `.NAME.before`, and gets its name
    back. Raises JobFailed, and UsageError for what is no directory or cannot be replaced.
    """
    place = _resolved(directory)
    partial, before = (place.with_name(f".{place.name}.{state}") for state in ("partial", "before"))
    with files.writing(directory):
        if before.exists() and not place.exists():
            before.rename(place)
        for leftover in (partial, before):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
    try:
        yield partial
        with files.writing(directory):
            files.write_text(partial / LIST, "".join(f"{name}\n" for name in _files(partial)))
            if place.exists():
                place.rename(before)
            partial.rename(place)
            files.sync_directory(place.parent)
    finally:
        if before.exists() and not place.exists():
            before.rename(place)
        for leftover in (partial, before):
            shutil.rmtree(leftover, ignore_errors=True)


def _resolved(directory: Path) -> Path:
    """Where it is, links followed. Raises UsageError for what no directory can be put in the place of."""
    try:
        place = directory.resolve()
        if place.exists() and not place.is_dir():
            raise UsageError(f"{directory} is no directory: name another place")
        if os.path.ismount(place):
            raise UsageError(
                f"{directory} is a mount point, which cannot be replaced: name a directory in it"
            )
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        raise UsageError(f"{directory}: cannot be written: {error}") from error
    return place


def _not_written_here(directory: Path) -> list[str]:
    listed = (files.read(directory / LIST) or "").splitlines()
    # A network file system keeps an open file that was removed under such a name.
    found = (name for name in _files(directory) if not Path(name).name.startswith(".nfs"))
    return [name for name in found if name not in {*listed, LIST}]


def _files(directory: Path) -> list[str]:
    """All files below it and links of any kind, relative and sorted."""
    paths = (path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(path.relative_to(directory).as_posix() for path in paths)
