"""The thin edge: everything detection may touch is a root directory, an environment and a command runner.

A vendor's tool is asked within limits: a driver in trouble keeps its tool silent for minutes, or talking.
"""

import logging
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bundle import files
from bundle.environment.facts import Fact

_log = logging.getLogger(__name__)

Run = Callable[[Sequence[str]], Fact[str]]

# The mounts of a busy Kubernetes node are the longest text that is read: some hundred kilobytes.
LARGEST_FILE = 2**22
# A healthy tool answers in well under a second, with some hundred bytes for each device.
SECONDS = 10.0
MOST_BYTES = 2**20
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CONTROLS = re.compile(r"[^\S\n\t ]|[\x00-\x08\x0e-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Machine:
    """A machine to look at: the real one, or a directory and recorded answers that stand for one."""

    root: Path
    environ: Mapping[str, str]
    run: Run

    def read(self, path: str) -> Fact[str]:
        """The text of the file at the absolute `path` under the root, or why there is none."""
        try:
            data = files.content(self.root / path.lstrip("/"), LARGEST_FILE)
            return Fact(data.decode(errors="replace"), path)
        except OSError as error:
            return Fact(None, f"{path}: {error.strerror}")

    def names(self, directory: str) -> tuple[str, ...]:
        """The sorted names in a directory; none if it does not exist or may not be read."""
        try:
            return tuple(sorted(entry.name for entry in (self.root / directory.lstrip("/")).iterdir()))
        except (OSError, ValueError):  # not there, not ours to read, or no name at all
            return ()


def local() -> Machine:
    """The machine this process runs on."""
    return Machine(Path("/"), os.environ, run_command)


def run_command(command: Sequence[str]) -> Fact[str]:
    """The command's output, or why there is none: missing, failed, no end of words, or no answer in time."""
    shown, begun = " ".join(command), time.monotonic()
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )
    except FileNotFoundError:
        return Fact(None, f"{command[0]} is not on PATH")
    except OSError as error:
        return Fact(None, f"`{shown}`: {error}")
    try:
        out, err = _hear(process, begun + SECONDS)
        status = process.wait(SECONDS)
    except (TimeoutError, subprocess.TimeoutExpired):
        return Fact(None, f"`{shown}` timed out after {SECONDS:g} seconds")
    except OverflowError:
        return Fact(None, f"`{shown}` said more than {MOST_BYTES} bytes")
    finally:
        _end(process)
        _log.debug("`%s` was asked: %.2f seconds", shown, time.monotonic() - begun)
    if status:
        said = (err or out).strip().splitlines()
        return Fact(None, f"`{shown}` ended with {status}: {said[0][:500] if said else 'it said nothing'}")
    return Fact(out, f"`{shown}`")


def _hear(process: subprocess.Popen[bytes], deadline: float) -> tuple[str, str]:
    """What the process writes to its two streams. Raises TimeoutError or OverflowError past a limit."""
    heard = {process.stdout: bytearray(), process.stderr: bytearray()}
    with selectors.DefaultSelector() as open_streams:
        for stream in heard:
            assert stream is not None
            open_streams.register(stream, selectors.EVENT_READ)
        while open_streams.get_map():
            ready = open_streams.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                piece = os.read(key.fd, 2**16)
                heard[key.fileobj] += piece  # type: ignore[index]  # the streams registered above
                if not piece:
                    open_streams.unregister(key.fileobj)
                elif sum(map(len, heard.values())) > MOST_BYTES:
                    raise OverflowError
    out, err = (spoken(said) for said in heard.values())
    return out, err


def spoken(said: bytes | bytearray) -> str:
    """Lines of printable characters: what a tool says is shown on terminals."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", _COLOURS.sub("", said.decode(errors="replace")))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process, and what it started, unless it has ended; one that the driver holds is left alone."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
