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
_REQUIRED_UMASK_BITS = 0o027
DISK_FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def read_content(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes.

    Raises OSError, whose `strerror` has the reason. A pipe would block, a device may have no end, and neither
    can be read a second time.
    """
    try:
        mode = path.stat().st_mode
    except ValueError as error:  # a null character, or one that this locale cannot spell
        raise OSError(errno.EINVAL, f"not a valid file name: {error}") from error
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "a pipe or a device, not a regular file. Save its output to a file")
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes")
    return data


def read_json_object(path: Path, expected: str = "", limit: int = 4 << 20) -> dict[str, Any]:
    """Return the JSON object in a file of at most `limit` bytes.

    Raises UsageError, whose message ends with `expected`, where there is none.
    """
    try:
        document = json.loads(read_content(path, limit))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}{f'; {expected}' if expected else ''}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path}: must hold a JSON object, but holds a {type(document).__name__}")
    return document


def to_printable(name: object) -> str:
    """Return a foreign name in printable form, so that no control character reaches a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(name))


def is_file(path: Path) -> bool:
    """Return whether a regular file exists; False for a name that cannot be read or cannot exist."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # not searchable, too long, or with a null character
        return False


def is_directory(path: Path) -> bool:
    """Return whether a directory exists; False for a name that cannot be read or cannot exist."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def list_matches(directory: Path, pattern: str) -> list[Path]:
    """Return the paths in a directory that match a pattern, sorted; none where it cannot be read."""
    try:
        return sorted(directory.glob(pattern))
    except OSError:
        return []


def read_text_if_small(path: Path, limit: int = 4 << 20) -> str | None:
    """Return the file's text (bad bytes replaced); None for no regular file, one too big, or unreadable."""
    data = read_bytes_or_none(path, limit)
    return None if data is None else data.decode("utf-8", errors="replace")


def read_bytes_or_none(path: Path, limit: int = 4 << 20) -> bytes | None:
    """Return the file's bytes; None for no regular file (a pipe would wait), one too big, or unreadable."""
    try:
        return read_content(path, limit)
    except OSError:
        return None


def restrict_umask_to_group_read() -> None:
    """Deny others all rights to new files of this process, and the group to write: 0640 and 0750 at most."""
    os.umask(os.umask(_REQUIRED_UMASK_BITS) | _REQUIRED_UMASK_BITS)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by a file with `text`; the old file stays until the new one is on the disk."""
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
    """Replace `path` by `value` as JSON, in which every float reads back as the same number."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def compute_short_json_digest(value: object) -> str:
    """Return 16 hexadecimal digits of the digest of a value's JSON, independent of the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


class _PieceWriteFile(io.FileIO):
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


def open_large_file_writer(path: Path) -> io.BufferedWriter:
    """Open an empty file for large writes. Raises OSError."""
    return io.BufferedWriter(_PieceWriteFile(path, "wb"))


def sync_directory(directory: Path) -> None:
    """Flush the names in a directory to the disk: without it a power failure may undo a rename."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def convert_write_errors(path: Path) -> Iterator[None]:
    """Raise JobFailed, with one message, for an error in the block that keeps `path` from being written."""
    try:
        yield
    except OSError as error:
        raise build_write_error(path, error) from error


def build_write_error(path: Path, error: BaseException) -> JobFailed:
    """Return the error to raise when `path` could not be written."""
    if is_disk_full(error):
        free = f"{format_bytes(find_free_bytes(path))} free"
        if inodes := _count_inodes_if_exhausted(path):
            return JobFailed(
                f"{path}: no inodes left to write (all {inodes} are in use, {free})."
                " Remove files, raise the quota of files, or lower checkpoint.keep."
            )
        return JobFailed(
            f"{path}: no room left to write: its disk is full, or a quota is reached ({free})."
            " Free space, raise the quota, or lower checkpoint.keep."
        )
    return JobFailed(f"{path}: cannot be written: {str(error) or type(error).__name__}")


def find_free_bytes(path: Path) -> int:
    """Return the bytes that are free on the disk of `path`, which need not exist."""
    return shutil.disk_usage(_find_existing_path(path)).free


def _count_inodes_if_exhausted(path: Path) -> int:
    """Return the number of inodes on the disk of `path` where all are in use; else 0."""
    status = os.statvfs(_find_existing_path(path))
    return 0 if status.f_favail else status.f_files  # some file systems count none


def _find_existing_path(path: Path) -> Path:
    """Return the path itself, or its nearest parent that exists."""
    return next(candidate for candidate in (path, *path.absolute().parents) if candidate.exists())


def is_disk_full(error: BaseException) -> bool:
    """Return whether a full disk, a quota or a size limit caused `error`."""
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRORS:
        return True
    # torch wraps the errors of writers in a text of its own.
    return any(os.strerror(number) in str(error) for number in DISK_FULL_ERRORS)
