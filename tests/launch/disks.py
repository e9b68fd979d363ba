"""Disks that fail under a running process: ext4 in an image, mounted in the namespace of that process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

# FS_IOC_SHUTDOWN of the kernel, by which a file system answers every request with an error.
_SHUTDOWN = (
    "import fcntl, os, sys; fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0x8004587D, b'\\2\\0\\0\\0')"
)


def enter(process: subprocess.Popen, *command: str | Path) -> None:
    """Run a command in the mount namespace of a process."""
    subprocess.run(["nsenter", f"--mount=/proc/{process.pid}/ns/mnt", *command], check=True, timeout=30)


def turn_read_only(process: subprocess.Popen, disk: Path) -> None:
    """Let the kernel find an error in the file system, whose mount option then makes it read-only."""
    mounts = Path(f"/proc/{process.pid}/mounts").read_text()
    device = re.search(rf"^/dev/(\w+) {disk} ext4 ", mounts, re.MULTILINE)
    assert device, mounts
    Path("/sys/fs/ext4", device[1], "trigger_fs_error").write_text("1")


def fill(process: subprocess.Popen, disk: Path) -> None:
    """Leave no room in the file system."""
    enter(process, "sh", "-c", f"cat /dev/zero >{disk}/filler; sync {disk}/filler")


def unmount(process: subprocess.Popen, disk: Path) -> None:
    enter(process, "umount", "--lazy", disk)


def shut_down(process: subprocess.Popen, disk: Path) -> None:
    enter(process, sys.executable, "-c", _SHUTDOWN, disk)


def create_disk(tmp_path: Path, size: int) -> Path:
    """Create an image with ext4 of `size` bytes, and return where `mount_disk` mounts it.

    Skip the test where this machine mounts none.
    """
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(size)
    try:
        subprocess.run(["mkfs.ext4", "-q", image], check=True, timeout=60)
        subprocess.run(["unshare", "--mount", "mount", "-o", "loop", image, "/mnt"], check=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be made: {error}")
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def mount_disk(disk: Path) -> tuple[str, ...]:
    """Return the words before a command that run it where the disk is mounted, with a directory `run`."""
    mount = f"mount -o loop,errors=remount-ro {disk.parent / 'image'} {disk}; mkdir -p {disk / 'run'}"
    return ("unshare", "--mount", "sh", "-ec", f'{mount}; exec "$@"', "sh")
