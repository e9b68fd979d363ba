"""Launches of two ranks in a process of their own, as a user starts them, and what becomes of them."""

import fcntl
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundle.capabilities.cpu import CPU
from bundle.launch import outcomes, verdict

ROOT = Path(__file__).parents[2]


def start(
    folder: Path, module: str, *arguments: str, logs: str = "logs", within: Sequence[str] = ()
) -> subprocess.Popen:
    """Start a launch in `folder`; `within` are the words of a command that runs all of it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [*within, sys.executable, "-m", "tests.launch.starter", logs, module, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True, preexec_fn=_hears_ctrl_c
    )


@dataclass
class Terminal:
    """A command in the foreground of a terminal of its own."""

    process: subprocess.Popen
    master: int

    @classmethod
    def of(cls, command: list[str], folder: Path, **environ: str) -> "Terminal":
        def take() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            _hears_ctrl_c()

        master, ours = os.openpty()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environ,
            stdin=ours,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=take,
        )
        os.close(ours)
        return cls(process, master)

    def ctrl_c(self) -> None:
        """The kernel sends SIGINT to the whole foreground, as if the key were pressed."""
        os.write(self.master, b"\x03")

    def finish(self, seconds: float = 60) -> tuple[int, str]:
        said, _ = self.process.communicate(timeout=seconds)
        os.close(self.master)
        return self.process.returncode, said


def common(nodes: int) -> dict[str, Any]:
    """What of a job's environment every backend has, as its launch is told of it."""
    table = [variable for variable in CPU.list_variables(frozenset(), nodes) if variable.is_overridable]
    values = {variable.name: variable.value for variable in table}
    return {"environment": values, "overridable_variables": frozenset(values)}


@contextmanager
def reserved() -> Iterator[int]:
    """A port that no other program is given, and that those which are told of it may listen on."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


_watched: dict[str, list[str]] = {}


@contextmanager
def asked(folder: Path) -> Iterator[list[str]]:
    """What this process asks the disk for in a folder: "open", "os.listdir", "os.scandir", each time."""
    _hook()
    events: list[str] = []
    _watched[str(folder)] = events
    try:
        yield events
    finally:
        del _watched[str(folder)]


@functools.cache
def _hook() -> None:
    """Hears of every file that this process opens: for good, since no audit hook can be taken back."""

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if _watched and event in ("open", "os.listdir", "os.scandir"):
            for folder, events in _watched.items():
                if str(arguments[0]).startswith(folder):
                    events.append(event)

    sys.addaudithook(hear)


def _hears_ctrl_c() -> None:
    """Undoes what a shell does to what it starts in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def finish(starter: subprocess.Popen, code: int, seconds: float = 60) -> tuple[str, str]:
    out, err = starter.communicate(timeout=seconds)
    assert starter.returncode == code, err
    return out, err


def read_verdict(folder: Path) -> dict[str, Any]:
    """The verdict that a launch in `folder` left in its log folder."""
    values: dict[str, Any] = json.loads((folder / "logs" / verdict.FILE_NAME).read_text())
    return values


def wait_until_ready(folder: Path, logs: Path | None = None) -> list[int]:
    """The ranks' processes, once all can hear."""
    wait_for_ranks(folder)
    return [outcome.pid for outcome in outcomes.read(logs or folder / "logs")]


def wait_for_ranks(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while len(list(folder.glob("ready-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pids: list[int], seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))
