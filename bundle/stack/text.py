"""Text of a file in somebody else's tree: regular, of bounded size, or nothing."""

from pathlib import Path


def read(path: Path, limit: int = 4 << 20) -> str | None:
    """The file's text (bad bytes replaced); None when it is no regular file, too big or unreadable."""
    data = read_bytes(path, limit)
    return None if data is None else data.decode("utf-8", errors="replace")


def read_bytes(path: Path, limit: int = 4 << 20) -> bytes | None:
    """The file's bytes; None when it is no regular file (a pipe would wait), too big or unreadable."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except (OSError, ValueError):  # ValueError: a null character in the name
        return None
    return data if len(data) <= limit else None
