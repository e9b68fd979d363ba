"""The reward code: the share of a row's tests that an answer's program passes.

The child of a reward loads this file by its path; it imports nothing of this package. `sandbox` starts each
program, `runner` is what the program executes.
"""

import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from select import select

_SANDBOX_SCRIPTS_FOLDER = Path(__file__).parent
# What the program sends when it waits for a message; as long as a token.
_READY_TOKEN = "." * 32
# The first of the users that programs run as where the trainer is root, and the one where these do not exist.
_FIRST_USER, _NOBODY = 2**30, 65534
_SET_SUBREAPER = 36


class SandboxError(Exception):
    """Why the sandbox of a program does not start."""

    is_explained = True


def find_last_block_or_answer(answer: str) -> str:
    """Return the last ```python block of an answer that is closed; all of the answer where there is none."""
    code = answer
    block: list[str] | None = None
    for line in answer.splitlines(keepends=True):
        mark = line.rstrip()
        if block is None:
            block = [] if mark == "```python" else None
        elif mark == "```":
            code, block = "".join(block), None
        else:
            block.append(line)
    return code


def list_descendants() -> set[int]:
    """Return the processes below this one, as far as one look shows them."""
    pids: set[int] = set()
    places = [os.getpid()]
    while places:
        with suppress(OSError):  # a process that has ended meanwhile
            for task in Path(f"/proc/{places.pop()}/task").iterdir():
                children = {*map(int, (task / "children").read_text().split())} - pids
                pids |= children
                places += children
    return pids


def send_signal(number: int, pids: set[int]) -> None:
    """Send a signal to those processes that still exist."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_descendants() -> None:
    """Kill the processes below this one until none is left; orphans among them become its children.

    They are stopped first: a killed process makes room for another one of a fork bomb, and a stopped one does
    not.
    """
    while True:
        stopped: set[int] = set()
        while running := list_descendants() - stopped:
            send_signal(signal.SIGSTOP, running)
            stopped |= running
            time.sleep(0.002)
        send_signal(signal.SIGKILL, stopped)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def choose_program_user() -> int | None:
    """Return the user that programs run as, this process's own one of them; None where that is this user."""
    if os.geteuid() != 0:
        return None
    ranges = [[*map(int, line.split())] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    for user in (_FIRST_USER + os.getpid(), _NOBODY):
        if any(first <= user < first + count for first, _, count in ranges):
            return user
    return None


def list_readable_paths() -> list[str]:
    """Return what a program sees of the file system: the system's programs and libraries, and Python."""
    system = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime"]
    folders = [sys.prefix, sys.base_prefix]
    python = {*folders, *map(os.path.realpath, [*folders, sys.executable])}
    return [*system, *sorted(python, key=len)]


class CodeJudge:
    """Runs programs, one at a time, in a process that has no other children."""

    def __init__(self, seconds: float, memory_gib: float) -> None:
        """Find out what the kernel allows. `seconds` are of an answer, `memory_gib` of each of its processes.

        Raise SandboxError where no program can be run within limits.
        """
        ctypes.CDLL(None).prctl(_SET_SUBREAPER, 1, 0, 0, 0)
        self._seconds, self._memory_bytes = seconds, int(memory_gib * 2**30)
        self._user, self._runner = choose_program_user(), (_SANDBOX_SCRIPTS_FOLDER / "runner.py").read_text()
        self._readable = list_readable_paths()
        self._is_isolated, self.notice = True, ""
        try:
            self._run_self_test()
        except SandboxError as refusal:
            self._is_isolated = False
            self.notice = (
                f"programs run without namespaces ({refusal}): they reach the network and all files"
                " that their user may read. Allow namespaces to this container."
            )
            try:
                self._run_self_test()
            except SandboxError as error:
                raise SandboxError(
                    f"the sandbox cannot start. With Linux namespaces: {refusal}. Without them: {error}"
                ) from None

    def _run_self_test(self) -> None:
        if self.judge("value = 6 * 7", ["assert value == 42"]) != 1:
            raise SandboxError("the self-test failed: a correct program did not pass its test")

    def judge(self, answer: str, tests: Sequence[str]) -> float:
        """Return the share of tests that the code of an answer passes. Raise SandboxError, OSError."""
        deadline = time.monotonic() + self._seconds
        with ExitStack() as stack:
            folder = tempfile.mkdtemp(prefix="bundle-code-")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            if self._user is not None:
                os.chown(folder, self._user, self._user)
            channel, program_end = socket.socketpair()
            status, status_end = os.pipe()
            stack.enter_context(channel)
            stack.callback(os.close, status)
            with program_end, os.fdopen(status_end, "wb"):
                process = self._start_sandbox(folder, program_end.fileno(), status_end)
            stack.callback(process.wait)
            stack.callback(kill_descendants)
            connection = _Connection(channel, status, deadline)
            if connection.receive() != _READY_TOKEN:
                raise SandboxError(connection.read_start_failure())
            return self._run_tests(connection, find_last_block_or_answer(answer), tests)

    def _run_tests(self, connection: "_Connection", code: str, tests: Sequence[str]) -> float:
        connection.send(code)
        passed, record = 0, connection.receive()
        for test in tests:
            if record != _READY_TOKEN:
                break
            token = secrets.token_hex(16)
            connection.send(f"t{test}")
            connection.send(f"n{token}")
            record = connection.receive()
            if record == token:
                passed += 1
                record = connection.receive()
        return passed / len(tests)

    def _start_sandbox(self, folder: str, channel: int, status: int) -> subprocess.Popen[bytes]:
        """Start the sandbox of a program, which shares no variable with this process."""
        setting = {
            "parent": os.getpid(),
            "is_isolated": self._is_isolated,
            "folder": folder,
            "readable": self._readable,
            "user": self._user,
            "is_user_shared": self._user is None or self._user == _NOBODY,
            "memory_bytes": self._memory_bytes,
            "seconds": self._seconds,
            "program": os.path.realpath(sys.executable),
            "command": [sys.executable, "-I", "-c", self._runner, str(channel), _READY_TOKEN],
            # One thread: OpenBLAS reserves memory for each core.
            "variables": {
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "HOME": folder,
                "LANG": "C.UTF-8",
                "OMP_NUM_THREADS": "1",
            },
        }
        script = [str(_SANDBOX_SCRIPTS_FOLDER / "sandbox.py"), json.dumps(setting), str(channel), str(status)]
        return subprocess.Popen(
            [sys.executable, "-I", "-S", *script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[channel, status],
            env={},
            cwd="/",
            start_new_session=True,
        )


class _Connection:
    """Messages to a program, and the records of 32 characters that it sends, until a deadline."""

    def __init__(self, channel: socket.socket, status: int, deadline: float) -> None:
        self._channel, self._status, self._deadline = channel, status, deadline

    @property
    def _remaining_seconds(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    def send(self, text: str) -> None:
        """Send a message; `receive` notes that the program has ended or reads nothing."""
        content = text.encode(errors="replace")
        self._channel.settimeout(self._remaining_seconds)
        with suppress(OSError):
            self._channel.sendall(b"%08d" % len(content) + content)

    def receive(self) -> str:
        """Return the next record; "" where the program has ended or its time is over."""
        record = b""
        while len(record) < len(_READY_TOKEN) and time.monotonic() < self._deadline:
            ready = select([self._channel.fileno(), self._status], [], [], self._remaining_seconds)[0]
            piece = b""
            if self._channel.fileno() in ready:
                with suppress(OSError):
                    piece = self._channel.recv(len(_READY_TOKEN) - len(record))
            if not piece:
                return ""
            record += piece
        return record.decode(errors="replace") if len(record) == len(_READY_TOKEN) else ""

    def read_start_failure(self) -> str:
        """Return why a program that sent nothing did not start."""
        os.set_blocking(self._status, False)
        with suppress(BlockingIOError):
            return os.read(self._status, 300).decode(errors="replace") or "the sandbox ended without a reason"
        return "the sandbox did not start in time"
