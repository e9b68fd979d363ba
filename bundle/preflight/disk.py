"""Whether a directory gives back what it took: `python -m bundle.preflight.disk DIRECTORY BYTES`."""

import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path

from bundle.preflight import ProbeResult

_PIECE_BYTES = 1 << 20


def probe(directory: Path, size: int) -> ProbeResult:
    """Writes a file, waits until it is on the disk, reads it and removes it."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:  # without a name, gone however this ends
            piece, written = os.urandom(_PIECE_BYTES), hashlib.sha256()
            began = time.perf_counter()
            for _ in range(size // _PIECE_BYTES):
                file.write(piece)
                written.update(piece)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - began
            read = hashlib.sha256()
            # What is kept in memory is what was written; what is on the disk may not be.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            while data := file.read(_PIECE_BYTES):
                read.update(data)
    except OSError as error:
        return ProbeResult(wrong=f"{directory}: {error.strerror}")
    if read.digest() != written.digest():
        return ProbeResult(wrong=f"{directory}: what is read is not what was written")
    return ProbeResult({"MB/s written": size / seconds / 1e6})


if __name__ == "__main__":
    probe(Path(sys.argv[1]), int(sys.argv[2])).print_result()
