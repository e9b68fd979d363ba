"""What the command-line clients of schedulers and engines answer, within a time."""

import shutil
import subprocess

from bundle import files
from bundle.errors import LaunchUnavailable

SECONDS = 60  # that a client may take


class NoAnswer(LaunchUnavailable):
    """A client did not answer in time: what it was asked for may be done, or be done yet."""


def asked(*command: str, seconds: float | None = SECONDS, errors_too: bool = False) -> str:
    """What a client prints, on stderr as well where its `errors_too` are asked for.

    Raises LaunchUnavailable where there is no such client, and with what it says against the question;
    NoAnswer where it says nothing in time.
    """
    if shutil.which(command[0]) is None:
        raise LaunchUnavailable(f"{command[0]} is not on the PATH: run this where it is installed")
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if errors_too else subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{command[0]} did not answer within {seconds} s") from None
    if done.returncode:
        said = done.stdout if errors_too else done.stderr
        raise LaunchUnavailable(f"{command[0]}: {files.printable(said.strip())[:2000]}")
    return done.stdout
