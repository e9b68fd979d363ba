"""One process that judges: what it is asked, what came back, and when it is ended and started anew."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from bundle.rewards import child
from bundle.rewards.judging import Failure, FailureKind, Verdict

# Seconds in which a reward must be loaded: its file may import torch.
LOAD_SECONDS = 120.0
# Answers of one call that may run out of time or end a child; with the last one all others are lost, too.
MAX_OVERRUNS_PER_CALL = 10
# Seconds between two looks at whether a process lives: its children may hold its connection open.
_LIVENESS_CHECK_SECONDS = 0.5


class LoadError(Exception):
    """Why a reward cannot be loaded."""

    def __init__(self, reason: str, is_installed: bool = True) -> None:
        self.is_installed = is_installed
        super().__init__(reason)


class RewardProcess:
    """Judges answers in a child process; after a time-out or a death another child takes its place."""

    def __init__(self, setting: dict[str, Any], timeout: float, *, one_by_one: bool) -> None:
        """`setting` is for `child.build_judge_and_notice`; `timeout` [s] is of a call, or of an answer."""
        self._setting, self._timeout, self._one_by_one = setting, timeout, one_by_one
        self.load_error: LoadError | None = None
        self.notice = ""  # of the child, for the log
        self.verdicts: list[Verdict] = []
        self._answers: Sequence[str] = ()
        self._rows: Sequence[Any] = ()
        self._overruns = 0
        self._start()

    @property
    def has_open_answers(self) -> bool:
        """True if some answers are without a verdict."""
        return len(self.verdicts) < len(self._answers)

    def _start(self) -> None:
        """Start a child, which loads the reward; `receive` is told when it is ready."""
        self.connection, remote = Pipe()
        command = [sys.executable, "-P", child.__file__, str(remote.fileno()), str(os.getpid())]
        with remote:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[remote.fileno()], start_new_session=True
            )
        self.is_loading, self.load_error, self._is_stopped = True, None, False
        self.deadline = time.monotonic() + LOAD_SECONDS
        with suppress(OSError):  # `receive` sees that it has died
            self.connection.send(self._setting)

    def begin_judging(self, answers: Sequence[str], rows: Sequence[Any]) -> None:
        """Ask for verdicts on answers; a child that could not be loaded is started once more."""
        self._answers, self._rows, self.verdicts, self._overruns = answers, rows, [], 0
        if not answers:
            return
        if self.load_error is not None or self._process.poll() is not None:
            self._kill_process_group()
            self._start()
        elif not self.is_loading:
            self._send_unjudged_answers()

    def _send_unjudged_answers(self) -> None:
        """Send the answers that have no verdict to a child that waits for them."""
        count = len(self.verdicts)
        self.deadline = time.monotonic() + self._timeout
        with suppress(OSError):  # `receive` sees that it has died
            self.connection.send((list(self._answers[count:]), list(self._rows[count:])))

    def receive_message(self) -> None:
        """Take a message of the child."""
        try:
            message: dict[str, Any] = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.handle_child_death()
            return
        if "verdicts" in message:
            self.verdicts += [
                Failure(*verdict) if isinstance(verdict, list) else verdict for verdict in message["verdicts"]
            ]
            self.deadline = time.monotonic() + self._timeout
            return
        self.is_loading, self.notice = False, message.get("notice", "")
        if "error" in message:
            self._record_load_failure(message["reason"], message["error"] != "not_installed")
        elif self.has_open_answers:
            self._send_unjudged_answers()

    def handle_timeout_or_death(self) -> None:
        """End the child where it has run out of time; note that it has died."""
        if time.monotonic() >= self.deadline:
            if self.is_loading:
                self._kill_process_group()
                self._record_load_failure(f"it took more than {LOAD_SECONDS:g} s")
            else:
                self._replace("timed_out", f"it took more than {self._timeout:g} s")
        elif self._process.poll() is not None and not self.connection.poll():
            self.handle_child_death()

    def handle_child_death(self) -> None:
        """Replace a child that has ended by itself."""
        self._kill_process_group()
        status = self._process.returncode
        reason = (
            f"its process ended by {signal.Signals(-status).name}"
            if status < 0
            else f"its process ended with status {status}"
        )
        if self.is_loading:
            self._record_load_failure(reason)
        else:
            self._replace("died", reason)

    def _replace(self, kind: FailureKind, reason: str) -> None:
        """Count the answers that are lost with this child, and start another one for those behind them."""
        self._kill_process_group()
        self._overruns += 1
        left = len(self._answers) - len(self.verdicts)
        lost = 1 if self._one_by_one and self._overruns < MAX_OVERRUNS_PER_CALL else left
        self.verdicts += [Failure(kind, reason)] * lost
        self._start()

    def _record_load_failure(self, reason: str, is_installed: bool = True) -> None:
        self.is_loading = False
        self.load_error = LoadError(reason, is_installed)
        lost = len(self._answers) - len(self.verdicts)
        self.verdicts += [Failure("raised", f"it cannot be loaded ({reason})")] * lost

    def _kill_process_group(self) -> None:
        """Kill the child and what it has started, once: its number may be another's then."""
        if self._is_stopped:
            return
        self._is_stopped = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()

    def close(self) -> None:
        """End the child."""
        self._kill_process_group()


def receive_while_busy(
    processes: Collection[RewardProcess], is_busy: Callable[[RewardProcess], bool]
) -> None:
    """Take the messages of all processes until none is busy any more, whatever becomes of them."""
    while busy := {process.connection: process for process in processes if is_busy(process)}:
        rest = min(process.deadline for process in busy.values()) - time.monotonic()
        ready = wait(list(busy), max(0.0, min(rest, _LIVENESS_CHECK_SECONDS)))
        for connection in ready:
            if isinstance(connection, Connection):
                busy[connection].receive_message()
        for process in busy.values():
            if process.connection not in ready and is_busy(process):
                process.handle_timeout_or_death()
