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

MANIFEST = ".written-by-mcore-bundle"  # the files of a directory that was written here, a name a line


def refuse_overwrite(directory: Path, sources: Iterable[Path], *, force: bool) -> None:
    """Raises UsageError where writing `directory` would take what is read, or what was not written here.

    `force` has a directory of anybody's replaced, but no source.
    """
    destination = _resolve_destination(directory)
    for source in sources:
        source_path = source.resolve()
        if destination.is_relative_to(source_path) or source_path.is_relative_to(destination):
            raise UsageError(f"{directory} is, holds or lies in {source}, which is read: name another one")
    if not force and destination.exists() and (foreign_files := _list_foreign_files(destination)):
        more = f" and {len(foreign_files) - 1} more" if len(foreign_files) > 1 else ""
        raise UsageError(
            f"{directory} holds {files.to_printable(foreign_files[0])}{more}, which was not exported"
            " or imported to it:"
            " name another directory, or have all of it replaced with --force"
        )


@contextmanager
def replace_directory(directory: Path) -> Iterator[Path]:
    """An empty folder to write into, which becomes `directory` when the block ends without an error.

    Of a link what it names is replaced. Whoever is killed before the end leaves `.NAME.partial`, which the
    next one removes; between the two renames at the end what was there is `.NAME.before`, and gets its name
    back. Raises JobFailed, and UsageError for what is no directory or cannot be replaced.
    """
    destination = _resolve_destination(directory)
    partial, previous = (
        destination.with_name(f".{destination.name}.{suffix}") for suffix in ("partial", "before")
    )
    with files.convert_write_errors(directory):
        if previous.exists() and not destination.exists():
            previous.rename(destination)
        for leftover in (partial, previous):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
    try:
        yield partial
        with files.convert_write_errors(directory):
            files.write_text(partial / MANIFEST, "".join(f"{name}\n" for name in _list_files(partial)))
            if destination.exists():
                destination.rename(previous)
            partial.rename(destination)
            files.sync_directory(destination.parent)
    finally:
        if previous.exists() and not destination.exists():
            previous.rename(destination)
        for leftover in (partial, previous):
            shutil.rmtree(leftover, ignore_errors=True)


def _resolve_destination(directory: Path) -> Path:
    """Where it is, links followed. Raises UsageError for what no directory can be put in the place of."""
    try:
        destination = directory.resolve()
        if destination.exists() and not destination.is_dir():
            raise UsageError(f"{directory} is no directory: name another place")
        if os.path.ismount(destination):
            raise UsageError(
                f"{directory} is a mount point, which cannot be replaced: name a directory in it"
            )
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        raise UsageError(f"{directory}: cannot be written: {error}") from error
    return destination


def _list_foreign_files(directory: Path) -> list[str]:
    manifest_names = (files.read_text(directory / MANIFEST) or "").splitlines()
    # A network file system keeps an open file that was removed under such a name.
    file_names = (name for name in _list_files(directory) if not Path(name).name.startswith(".nfs"))
    return [name for name in file_names if name not in {*manifest_names, MANIFEST}]


def _list_files(directory: Path) -> list[str]:
    """All files below it and links of any kind, relative and sorted."""
    paths = (path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(path.relative_to(directory).as_posix() for path in paths)
