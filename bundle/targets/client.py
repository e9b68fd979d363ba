"""What the command-line clients of schedulers and engines answer, within a time."""

import shutil
import subprocess

from bundle import files
from bundle.errors import LaunchUnavailable

TIMEOUT_SECONDS = 60  # that a client may take


class ClientTimeout(LaunchUnavailable):
    """A client did not answer in time: what it was asked for may be done, or be done yet."""


def run_client(*command: str, seconds: float | None = TIMEOUT_SECONDS, include_stderr: bool = False) -> str:
    """What a client prints, on stderr as well where its `include_stderr` are asked for.

    Raises LaunchUnavailable where there is no such client, and with what it says against the question;
    NoAnswer where it says nothing in time.
    """
    if shutil.which(command[0]) is None:
        raise LaunchUnavailable(f"{command[0]} is not on the PATH: run this where it is installed")
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
        raise LaunchUnavailable(f"{command[0]}: {files.to_printable(message.strip())[:2000]}")
    return completed.stdout
