"""Disks that fail under a running process: ext4 in an image, mounted in the namespace of that process."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_MOUNT = "mount -o loop,errors=remount-ro"
# FS_IOC_SHUTDOWN of the kernel, by which a file system answers every request with an error.
_SHUTDOWN = (
    "import fcntl, os, sys; fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0x8004587D, b'\\2\\0\\0\\0')"
)


def enter(pid: int, *command: str | Path) -> None:
    """Run a command in the namespaces of a process, of mounts and of processes."""
    subprocess.run(["nsenter", f"--target={pid}", "--mount", "--pid", *command], check=True, timeout=30)


@contextmanager
def open_mount_namespace() -> Iterator[int]:
    """Give a process with a mount namespace of its own, in which commands mount what others do not see.

    Namespaces that are made in it, with propagation `slave`, see what is mounted in it later.
    """
    holder = subprocess.Popen(
        ["unshare", "--mount", "sh", "-ec", "mount --make-rshared /; echo; exec sleep infinity"],
        stdout=subprocess.PIPE,
    )
    assert holder.stdout
    try:
        assert holder.stdout.readline() == b"\n"
        yield holder.pid
    finally:
        holder.kill()
        holder.communicate()


def turn_read_only(pid: int, disk: Path) -> None:
    """Let the kernel find an error in the file system, whose mount option then makes it read-only."""
    mounts = Path(f"/proc/{pid}/mounts").read_text()
    device = re.search(rf"^/dev/(\w+) {disk} ext4 ", mounts, re.MULTILINE)
    assert device, mounts
    Path("/sys/fs/ext4", device[1], "trigger_fs_error").write_text("1")


def fill(pid: int, disk: Path) -> None:
    """Leave no room in the file system."""
    enter(pid, "sh", "-c", f"cat /dev/zero >{disk}/filler; sync {disk}/filler")


def unmount(pid: int, disk: Path) -> None:
    enter(pid, "umount", "--lazy", disk)


def shut_down(pid: int, disk: Path) -> None:
    enter(pid, sys.executable, "-c", _SHUTDOWN, disk)


def mount_in_namespace(pid: int, disk: Path) -> None:
    """Mount a disk in the mount namespace of a process, without errors of its last use, and with room."""
    image = disk.parent / "image"
    repair = f'umount "$1" 2>/dev/null || :; fsck.ext4 -fy "$0" >&2 || [ $? -le 2 ]; {_MOUNT} "$0" "$1"'
    enter(pid, "sh", "-ec", f'{repair}; rm -f "$1/filler"', image, disk)


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
    mount = f"{_MOUNT} {disk.parent / 'image'} {disk}; mkdir -p {disk / 'run'}"
    return ("unshare", "--mount", "sh", "-ec", f'{mount}; exec "$@"', "sh")
