"""Starts a program that nobody trusts, within limits; runs as a script: sandbox.py SETTING CHANNEL STATUS.

It imports nothing of this package. SETTING is JSON (`code.CodeJudge`). The program inherits the file
descriptor CHANNEL. Why a program cannot start goes to STATUS, which closes when the program has ended.

Three processes belong to a program: this one; the first process of new namespaces, with which the kernel
ends all others; and the program, whose user has no rights. Sources: the manual pages namespaces(7), mount(2),
pivot_root(2) and prctl(2).
"""

import ctypes
import json
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from typing import Any

# Of each program: processes and threads; bytes of a file, and of all files where there is a root of its own.
PROCESSES, FILE_BYTES, ROOT_BYTES, OPEN_FILES = 64, 2**24, 2**26, 256

_NEW_MOUNTS, _NEW_USERS = 0x20000, 0x10000000
_NAMESPACE_FLAGS = _NEW_MOUNTS | 0x20000000 | 0x40000000 | 0x8000000 | 0x4000000  # pid, net, ipc, uts
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _NO_EXECUTION = 1, 2, 4, 8
_REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
_DETACH_MOUNT = 2
_SET_PARENT_DEATH_SIGNAL, _SET_DUMPABLE, _SET_SECURE_BITS, _SET_NO_NEW_PRIVILEGES = 1, 4, 28, 38
_NO_ROOT_SECURE_BITS = 3  # user 0 gains no capabilities by exec, and this is locked
_C_LIBRARY = ctypes.CDLL(None, use_errno=True)
_DEVICE_NAMES = ("null", "zero", "full", "random", "urandom")


def call_c_function(name: str, *arguments: str | int | None) -> None:
    """Call a function of the C library. Raise OSError with its name where it fails."""
    words = [os.fsencode(word) if isinstance(word, str) else word for word in arguments]
    longs = [ctypes.c_ulong(word) if isinstance(word, int) else word for word in words]
    if getattr(_C_LIBRARY, name)(*longs) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def bind_mount_read_only(source: str, target: str) -> None:
    """Show a file or folder at another path, for reading alone."""
    if os.path.isdir(source):  # noqa: PTH112  # pathlib takes long to import
        os.makedirs(target, exist_ok=True)  # noqa: PTH103
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH103, PTH120
        os.close(os.open(target, os.O_CREAT, 0o644))
    call_c_function("mount", source, target, None, _BIND | _RECURSIVE, None)
    if not source.startswith("/dev/"):
        inherited = os.statvfs(target).f_flag & _NO_EXECUTION
        flags = _BIND | _REMOUNT | _READ_ONLY | _NO_SETUID | _NO_DEVICES | inherited
        call_c_function("mount", None, target, None, flags, None)


def change_root(root: str, readable: list[str]) -> None:
    """Leave nothing of the file system but `readable`, a bounded /tmp, and `root`, an empty folder."""
    call_c_function("mount", None, "/", None, _RECURSIVE | _PRIVATE, None)
    options = f"size={ROOT_BYTES},nr_inodes=20000,mode=755"
    call_c_function("mount", "tmpfs", root, "tmpfs", _NO_SETUID | _NO_DEVICES, options)
    bound: list[str] = []
    for path in [*readable, *(f"/dev/{name}" for name in _DEVICE_NAMES)]:
        if os.path.exists(path) and not any(f"{path}/".startswith(f"{other}/") for other in bound):  # noqa: PTH110
            bind_mount_read_only(path, root + path)
            bound.append(path)
    for path in ("/tmp", "/dev/shm", "/proc", "/old", root):
        os.makedirs(root + path, exist_ok=True)  # noqa: PTH103
        os.chmod(root + path, 0o1777)  # noqa: PTH101
    call_c_function("pivot_root", root, f"{root}/old")
    os.chdir("/")
    call_c_function("umount2", "/old", _DETACH_MOUNT)
    os.rmdir("/old")  # noqa: PTH106


def switch_user(user: int | None) -> None:
    """Become another user, where this one is root and another one exists."""
    if user is not None and os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def enter_namespaces(user: int | None) -> None:
    """Enter new namespaces; without root's rights, inside a new user namespace."""
    try:
        call_c_function("unshare", _NAMESPACE_FLAGS)
    except PermissionError:
        switch_user(user)
        call_c_function("prctl", _SET_DUMPABLE, 1, 0, 0, 0)  # else the files below are root's
        identity = {"uid_map": f"{os.getuid()} {os.getuid()} 1", "gid_map": f"{os.getgid()} {os.getgid()} 1"}
        call_c_function("unshare", _NAMESPACE_FLAGS | _NEW_USERS)
        for name, text in ({"setgroups": "deny"} | identity).items():
            write_kernel_file(f"/proc/self/{name}", text)


def write_kernel_file(path: str, text: str) -> None:
    """Write a file of the kernel, in one call."""
    with open(path, "w") as file:  # noqa: PTH123
        file.write(text)


def count_user_threads() -> int:
    """Return the threads of this user: the kernel counts them all against the limit of processes."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        with suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == os.getuid():  # noqa: PTH116
                count += len(os.listdir(f"/proc/{name}/task"))  # noqa: PTH208
    return count


def lower_resource_limit(kind: int, most: int) -> None:
    """Lower a limit of this process."""
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def enforce_process_limit(most: int) -> None:
    """Limit the processes of this user. Raise PermissionError where the kernel does not enforce the limit."""
    lower_resource_limit(resource.RLIMIT_NPROC, most)
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (0, hard))
    try:
        child = os.fork()
    except BlockingIOError:
        resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
        return
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    raise PermissionError("the number of processes cannot be limited for this user")


def become_program(setting: dict[str, Any]) -> None:
    """Give up every right, set the limits and execute the program."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    os.setsid()
    os.chdir(setting["folder"])
    with suppress(OSError):  # a user without capabilities has none to lose
        call_c_function("prctl", _SET_SECURE_BITS, _NO_ROOT_SECURE_BITS, 0, 0, 0)
    switch_user(setting["user"])
    call_c_function("prctl", _SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call_c_function("prctl", _SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    enforce_process_limit(setting["processes"])
    lower_resource_limit(resource.RLIMIT_AS, setting["memory_bytes"])
    lower_resource_limit(resource.RLIMIT_CPU, int(setting["seconds"]) + 1)
    lower_resource_limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    lower_resource_limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    lower_resource_limit(resource.RLIMIT_CORE, 0)
    os.execve(setting["program"], setting["command"], setting["variables"])


def supervise_program(setting: dict[str, Any], descriptors: list[int]) -> None:
    """Start the program as the first process of the namespaces; return when it or its time has ended."""
    call_c_function("prctl", _SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if setting["is_isolated"]:
        with suppress(OSError):  # containers that hide parts of /proc refuse it
            call_c_function("mount", "proc", "/proc", "proc", _NO_SETUID | _NO_DEVICES | _NO_EXECUTION, None)
    end = time.monotonic() + setting["seconds"] + 1
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    program = os.fork()
    if program == 0:
        become_program(setting)
    for descriptor in descriptors:
        os.close(descriptor)
    while (rest := end - time.monotonic()) > 0:
        signal.sigtimedwait({signal.SIGCHLD}, rest)
        while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            if ended == program:
                return


def main() -> None:
    """Start a program, wait for its end, and report what hinders it from starting."""
    setting, channel, status = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.set_inheritable(status, False)
    os.umask(0o022)  # the program is another user, who passes through directories that are made here
    try:
        call_c_function("prctl", _SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != setting["parent"]:
            os._exit(1)
        with suppress(OSError):  # where memory runs out, the trainer shall live
            write_kernel_file("/proc/self/oom_score_adj", "1000")
        setting["processes"] = PROCESSES + (count_user_threads() if setting["is_user_shared"] else 0)
        if setting["is_isolated"]:
            enter_namespaces(setting["user"])
            call_c_function(
                "prctl", _SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0
            )  # another user: it is forgotten
            change_root(setting["folder"], setting["readable"])
        first = os.fork()
        if first == 0:
            supervise_program(setting, [channel, status])
        else:
            os.close(channel)
            os.waitpid(first, 0)
    except BaseException as error:  # noqa: BLE001  # whatever it is, the judge reports it
        name = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        os.write(status, f"{name}{error}".encode()[:300])
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
