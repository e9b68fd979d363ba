"""Text of a file in somebody else's tree: regular, of bounded size, or nothing."""

from pathlib import Path

from bundle import files


def printable(name: object) -> str:
    """A name from somebody else's tree as it may be printed: no control character reaches a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(name))


def is_file(path: Path) -> bool:
    """Whether there is a regular file; a name that nobody may look at, or that cannot be, is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # not searchable, too long, or with a null character
        return False


def is_directory(path: Path) -> bool:
    """Whether there is a directory; a name that nobody may look at, or that cannot be, is none."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def read(path: Path, limit: int = 4 << 20) -> str | None:
    """The file's text (bad bytes replaced); None when it is no regular file, too big or unreadable."""
    data = read_bytes(path, limit)
    return None if data is None else data.decode("utf-8", errors="replace")


def read_bytes(path: Path, limit: int = 4 << 20) -> bytes | None:
    """The file's bytes; None when it is no regular file (a pipe would wait), too big or unreadable."""
    try:
        return files.content(path, limit)
    except OSError:
        return None
