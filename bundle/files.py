"""Reading files that anybody may have put there, bounded; writing files whole or not at all; digests."""

import errno
import hashlib
import io
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bundle.errors import JobFailed, UsageError, format_bytes

# Bytes of a large file that are handed over at a time, and those after which it goes to the disk.
_PIECE_BYTES, _AHEAD_BYTES = 1 << 20, 1 << 26
DISK_FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def read_content(path: Path, limit: int) -> bytes:
    """The bytes of a regular file of at most `limit` bytes.

    Raises OSError, whose `strerror` says why there are none: a pipe would keep us waiting, a device may have
    no end, and neither can be read a second time.
    """
    try:
        mode = path.stat().st_mode
    except ValueError as error:  # a null character, or one that this locale cannot spell
        raise OSError(errno.EINVAL, f"no name of a file: {error}") from error
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "a pipe or a device, not a regular file: save what it gives in one")
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes")
    return data


def read_json_object(path: Path, expected: str = "", limit: int = 4 << 20) -> dict[str, Any]:
    """The JSON object in a file of at most `limit` bytes; else UsageError, with what was `expected` there."""
    try:
        document = json.loads(read_content(path, limit))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}{f'; {expected}' if expected else ''}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path}: must hold a JSON object, holds a {type(document).__name__}")
    return document


def to_printable(name: object) -> str:
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


def read_text(path: Path, limit: int = 4 << 20) -> str | None:
    """The file's text (bad bytes replaced); None when it is no regular file, too big or unreadable."""
    data = read_bytes(path, limit)
    return None if data is None else data.decode("utf-8", errors="replace")


def read_bytes(path: Path, limit: int = 4 << 20) -> bytes | None:
    """The file's bytes; None when it is no regular file (a pipe would wait), too big or unreadable."""
    try:
        return read_content(path, limit)
    except OSError:
        return None


def write_text(path: Path, text: str) -> None:
    """Replaces `path` by a file with `text`; what was there stays until the new file is on the disk."""
    # Threads, and processes of other machines and containers, may write the same path now.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise build_write_error(path, error) from error


def write_json(path: Path, value: Any) -> None:
    """Replaces `path` by `value` as JSON, in which every float reads back as the same number."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def digest_json(value: object) -> str:
    """16 hexadecimal digits over a value's JSON, whatever the order of its keys: two who have it agree."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


class _PiecewiseFile(io.FileIO):
    """A file that takes a part of what it is given, as any may: whoever writes comes back with the rest.

    For more at once Linux takes large pages, which the host of a virtual machine may have to find first:
    that was seen to take two to five times as long.
    """

    _flushed = _written = 0

    def write(self, data: Any) -> int:
        taken = super().write(memoryview(data)[:_PIECE_BYTES])
        self._written += taken
        if self._written - self._flushed >= _AHEAD_BYTES and hasattr(os, "posix_fadvise"):
            # By which the kernel begins to put it on the disk, and waits for nothing.
            os.posix_fadvise(self.fileno(), self._flushed, _AHEAD_BYTES, os.POSIX_FADV_DONTNEED)
            self._flushed = self._written
        return taken


def open_writer(path: Path) -> io.BufferedWriter:
    """The file, empty, for large writes. Raises OSError."""
    return io.BufferedWriter(_PiecewiseFile(path, "wb"))


def sync_directory(directory: Path) -> None:
    """Puts the names in a directory on the disk: without it a rename may be lost with the power."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def convert_write_errors(path: Path) -> Iterator[None]:
    """Raises JobFailed, in one message, for what keeps `path` from being written in the block."""
    try:
        yield
    except OSError as error:
        raise build_write_error(path, error) from error


def build_write_error(path: Path, error: BaseException) -> JobFailed:
    """The error to raise when `path` could not be written."""
    if is_disk_full(error):
        return JobFailed(
            f"{path}: no room left to write ({format_bytes(find_free_bytes(path))} free on its disk):"
            " free some, raise the quota, or lower checkpoint.keep"
        )
    return JobFailed(f"{path}: cannot be written: {str(error) or type(error).__name__}")


def find_free_bytes(path: Path) -> int:
    """Bytes that are free where `path` is, or would be."""
    existing_path = next(candidate for candidate in (path, *path.absolute().parents) if candidate.exists())
    return shutil.disk_usage(existing_path).free


def is_disk_full(error: BaseException) -> bool:
    """Whether a full disk, a quota or a size limit is behind `error`."""
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRORS:
        return True
    # torch wraps the errors of writers in a text of its own.
    return any(os.strerror(number) in str(error) for number in DISK_FULL_ERRORS)
