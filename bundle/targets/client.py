"""Calls of the command-line clients of schedulers and engines, with a time limit."""

import shutil
import subprocess
import threading

from bundle import files
from bundle.errors import TargetUnavailable
from bundle.targets.states import TargetNotConfigured

TIMEOUT_SECONDS = 60  # the longest time for one answer of a client
# `launch list` asks all targets in threads. If two threads import clients with common modules at once, one of
# them may get a module that is not complete.
CLIENT_IMPORT_THREAD_LOCK = threading.Lock()


class ClientTimeout(TargetUnavailable):
    """The error that a client did not answer in time: its request may be done already, or later."""


def run_client(*command: str, seconds: float | None = TIMEOUT_SECONDS, include_stderr: bool = False) -> str:
    """Return what a client prints on stdout, with its stderr where `include_stderr` is set.

    Raise TargetNotConfigured where the client is not installed. Raise TargetUnavailable where it fails; the
    message has its output. Raise ClientTimeout where it does not answer within `seconds`.
    """
    if shutil.which(command[0]) is None:
        raise TargetNotConfigured(
            f"{command[0]} is not on the PATH. Run this where {command[0]} is installed"
        )
    try:
        completed = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if include_stderr else subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ClientTimeout(f"{command[0]} did not answer within {seconds} s") from None
    if completed.returncode:
        message = completed.stdout if include_stderr else completed.stderr
        raise TargetUnavailable(f"{command[0]}: {files.to_printable(message.strip())[:2000]}")
    return completed.stdout
