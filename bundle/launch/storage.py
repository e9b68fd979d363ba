"""The file system of a launch's log folder, whose failure the ranks that wait for it cannot report."""

import errno
import secrets
from pathlib import Path

from bundle import files


class LogFileSystem:
    """The file system that an existing log folder is on when this object is created."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        resolved_paths = (folder.resolve(), *folder.resolve().parents)
        self._mount = next(path for path in resolved_paths if path.is_mount())
        self._device = self._mount.stat().st_dev

    def find_write_failure(self) -> str:
        """Return why nothing can be written to the folder; empty where something can."""
        probe = self._folder / f".{secrets.token_hex(8)}"
        try:
            probe.write_bytes(b"\0")
            probe.unlink()
        except OSError as error:
            return self._describe_failure(error)
        return ""

    def _describe_failure(self, error: OSError) -> str:
        if files.is_disk_full(error):
            return str(files.build_write_error(self._folder, error))
        if error.errno == errno.ENOENT and self._is_unmounted():
            return (
                f"{self._mount}: the file system of the run directory is not mounted here now. Mount it again"
            )
        if error.errno == errno.ENOENT:
            return f"{self._folder}: the log folder was removed during the run. Keep it until the run ends"
        return (
            f"{self._folder}: its file system failed during the run ({error.strerror}). See `dmesg`, repair"
            " it, and mount it again"
        )

    def _is_unmounted(self) -> bool:
        try:
            return self._mount.stat().st_dev != self._device
        except OSError:
            return True
