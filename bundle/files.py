"""Reading files that anybody may have put there: regular ones, of bounded size."""

import errno
import os
import stat
from pathlib import Path


def content(path: Path, limit: int) -> bytes:
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
