"""Replacement of a directory as a whole or not at all, where overwriting is allowed.

The directory gets a list of the files that were written. A directory with other files is replaced only on
request.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bundle import files
from bundle.errors import UsageError

MANIFEST_FILE_NAME = (
    ".written-by-mcore-bundle"  # the files of a directory that was written here, a name a line
)


def refuse_overlap_and_foreign_files(directory: Path, sources: Iterable[Path], *, force: bool) -> None:
    """Raise UsageError where writing `directory` would overwrite a source or files not written here.

    `force` allows to replace any directory, but not a source.
    """
    destination = _resolve_destination(directory)
    for source in sources:
        source_path = source.resolve()
        if destination.is_relative_to(source_path) or source_path.is_relative_to(destination):
            raise UsageError(
                f"{directory}: this output directory overlaps the input {source}. Name another directory."
            )
    if not force and destination.exists() and (foreign_files := _list_foreign_files(destination)):
        more = f" and {len(foreign_files) - 1} more" if len(foreign_files) > 1 else ""
        raise UsageError(
            f"{directory}: has files that mcore-bundle did not write"
            f" ({files.to_printable(foreign_files[0])}{more}). Name another directory, or replace this one"
            " with --force."
        )


@contextmanager
def replace_directory(directory: Path) -> Iterator[Path]:
    """Yield an empty folder, which becomes `directory` when the block ends without an error.

    If `directory` is a link, its target is replaced. A process that is killed before the end leaves
    `.NAME.partial`, which the next call removes. Between the two renames at the end the earlier directory is
    `.NAME.before`; the next call gives it its name back. Raise JobFailed, and UsageError where `directory` is
    not a directory or cannot be replaced.
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
            files.write_text(
                partial / MANIFEST_FILE_NAME, "".join(f"{name}\n" for name in _list_files(partial))
            )
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
    """Return the path with links followed. Raise UsageError where no directory can take its place."""
    try:
        destination = directory.resolve()
        if destination.exists() and not destination.is_dir():
            raise UsageError(f"{directory}: not a directory. Name another place.")
        if os.path.ismount(destination):
            raise UsageError(f"{directory}: a mount point, which cannot be replaced. Name a directory in it.")
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        raise UsageError(f"{directory}: cannot be written: {error}") from error
    return destination


def _list_foreign_files(directory: Path) -> list[str]:
    manifest_names = (files.read_text_if_small(directory / MANIFEST_FILE_NAME) or "").splitlines()
    # A network file system keeps an open file that was removed under such a name.
    file_names = (name for name in _list_files(directory) if not Path(name).name.startswith(".nfs"))
    return [name for name in file_names if name not in {*manifest_names, MANIFEST_FILE_NAME}]


def _list_files(directory: Path) -> list[str]:
    """Return all files below a directory and links of any kind, relative and sorted."""
    paths = (path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(path.relative_to(directory).as_posix() for path in paths)
