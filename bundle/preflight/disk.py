"""A test that a directory returns what was written: `python -m bundle.preflight.disk DIRECTORY BYTES`."""

import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path

from bundle.preflight import ProbeResult

_PIECE_BYTES = 1 << 20


def probe_write_speed(directory: Path, size: int) -> ProbeResult:
    """Write a file, wait until it is on the disk, read it and remove it."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:  # the file has no name, so it is gone in any case
            piece, written = os.urandom(_PIECE_BYTES), hashlib.sha256()
            began = time.perf_counter()
            for _ in range(size // _PIECE_BYTES):
                file.write(piece)
                written.update(piece)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - began
            read = hashlib.sha256()
            # Drop the cached pages, so the data is read from the disk.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            while data := file.read(_PIECE_BYTES):
                read.update(data)
    except OSError as error:
        return ProbeResult(wrong=f"{directory}: {error.strerror}")
    if read.digest() != written.digest():
        return ProbeResult(wrong=f"{directory}: the data read differs from the data written")
    return ProbeResult({"MB/s written": size / seconds / 1e6})


if __name__ == "__main__":
    probe_write_speed(Path(sys.argv[1]), int(sys.argv[2])).print_result()
