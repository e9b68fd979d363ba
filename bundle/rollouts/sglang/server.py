"""Servers that a run starts: one process for each replica, with the Python where SGLang is installed."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

from packaging.version import InvalidVersion, Version

from bundle.errors import EnvironmentUnfit, JobFailed
from bundle.launch.rendezvous import LOOPBACK
from bundle.planning.rollout import OLDEST_SGLANG
from bundle.rollouts.sglang import guard
from bundle.rollouts.sglang.client import Client, Keys

_LOG_TAIL_LINES = 12
_RESTARTS, _BACKOFF_SECONDS = 5, 1.0
_PROBE_SECONDS, _PAUSE_SECONDS = 30.0, 0.2
# What torchrun tells a rank: a server would take itself for one.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_VERSION_SCRIPT = "import importlib.metadata as m; print(m.version('sglang'))"


def check_installation(python: str) -> str:
    """Return the version of SGLang in that Python. Raise EnvironmentUnfit without one, or with an old one."""
    try:
        result = subprocess.run(
            [python, "-c", _VERSION_SCRIPT],
            capture_output=True,
            text=True,
            timeout=60,
            env=build_environment(python),
            cwd="/",
        )
        version = result.stdout.strip() if result.returncode == 0 else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentUnfit(f"rl.rollout.python: {python} cannot be run ({error}).") from error
    if not version:
        raise EnvironmentUnfit(
            f"rl.rollout.python: {python} has no SGLang. Name the Python of an environment with"
            f" {OLDEST_SGLANG} or newer."
        )
    with suppress(InvalidVersion):
        if Version(version) >= Version(OLDEST_SGLANG):
            return version
    raise EnvironmentUnfit(
        f"rl.rollout.python: {python} has version {version!r} of SGLang. Install {OLDEST_SGLANG} or newer"
        " there."
    )


class Launcher(Protocol):
    """What starts a server; `keys` are those of its last start."""

    keys: Keys

    def start(self) -> str:
        """Start a server, in the place of the last one, and return its address."""

    def wait(self, seconds: float) -> bool:
        """Return whether it has ended, at once if so, else after so many seconds."""

    def read_tail(self) -> Sequence[str]:
        """Return the last lines that it wrote, without keys."""

    def stop(self) -> None:
        """End the server and all that it has started."""


class ServerProcess:
    """A server in a process of its own, in a session of its own, on a private port of the loopback."""

    def __init__(
        self,
        python: str,
        arguments: Sequence[str],
        log: Path,
        read_memory_arguments: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """`arguments` are those of sglang.launch_server, without address and keys; `log` is appended to.

        `read_memory_arguments` returns further ones, by the memory that is free when the server starts.
        """
        self.keys = Keys()
        self._python, self._arguments, self._log = python, tuple(arguments), log
        self._read_memory_arguments = read_memory_arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._tail: deque[str] = deque(maxlen=_LOG_TAIL_LINES)
        self._reader: threading.Thread | None = None

    def start(self) -> str:
        """Start a server, in the place of the last one, and return its address."""
        self.stop()
        self.keys = Keys(secrets.token_urlsafe(24), secrets.token_urlsafe(24))
        with socket.create_server((LOOPBACK, 0)) as listener:
            port = listener.getsockname()[1]
        arguments = [
            *self._arguments,
            *self._read_memory_arguments(),
            "--host",
            LOOPBACK,
            "--port",
            str(port),
        ]
        # In one word each: a key may begin with a hyphen, as an option does.
        arguments += [f"--api-key={self.keys.api}", f"--admin-api-key={self.keys.admin}"]
        self._process = subprocess.Popen(
            [self._python, "-P", guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=build_environment(self._python),
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):  # `wait` sees that it has ended
            job = {"module": "sglang.launch_server", "arguments": arguments}
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        self._tail.clear()
        self._reader = threading.Thread(
            target=self._copy_log, args=(self._process.stdout, self.keys), daemon=True
        )
        self._reader.start()
        return f"http://{LOOPBACK}:{port}"

    def wait(self, seconds: float) -> bool:
        """Return whether it has ended, at once if so, else after so many seconds."""
        if self._process is None:
            return True
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            return True
        return False

    def read_tail(self) -> list[str]:
        """Return the last lines that it wrote, without keys."""
        if self._reader is not None:
            self._reader.join(1.0)
        return list(self._tail)

    def stop(self) -> None:
        """Kill the server and all that it has started; its number may be another's then."""
        if self._process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        if self._reader is not None:
            self._reader.join(5.0)
        self._process = None

    def _copy_log(self, output: IO[bytes], keys: Keys) -> None:
        """Write the server's output to the log without keys: it logs all of its arguments."""
        with output, self._log.open("a", encoding="utf-8") as log:
            for line in output:
                text = keys.hide(line.decode(errors="replace"))
                self._tail.append(text.rstrip()[:500])
                log.write(text)
                log.flush()


class ServerReplica(Client):
    """A replica whose server we start, and start again where it fails; not for ever."""

    can_restart = True

    def __init__(
        self,
        name: str,
        launcher: Launcher,
        *,
        seconds: float,
        start_seconds: float,
        backoff_seconds: float = _BACKOFF_SECONDS,
        ranks: int = 1,
    ) -> None:
        """`seconds` limit a call, `start_seconds` a start until the server generates.

        `ranks` divide the server's tensors.
        """
        super().__init__(f"http://{LOOPBACK}:1", launcher.keys, seconds, ranks)
        self.name, self._launcher = name, launcher
        self._start_seconds, self._backoff_seconds = start_seconds, backoff_seconds
        self._starts = 0

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return not self._launcher.wait(0)

    def restart(self) -> None:
        """Start the server, and return when it generates. Raise JobFailed where it does not, or too often."""
        if self._starts > _RESTARTS:
            raise JobFailed(
                f"the server was started {self._starts} times. Look at its log.", self._launcher.read_tail()
            )
        self._launcher.stop()
        if self._starts:
            time.sleep(self._backoff_seconds * 2 ** (self._starts - 1))
        self._starts += 1
        name = self.name
        self.set_address(self._launcher.start())
        self.name, self._keys = name, self._launcher.keys
        deadline = time.monotonic() + self._start_seconds
        while not self.is_healthy(min(_PROBE_SECONDS, self._start_seconds)):
            has_ended = self._launcher.wait(_PAUSE_SECONDS)
            if has_ended or time.monotonic() > deadline:
                reason = "ends" if has_ended else f"does not answer within {self._start_seconds:g} s"
                tail = self._launcher.read_tail()
                self._launcher.stop()
                raise JobFailed(f"its server {reason} during its start. Its last lines:", tail)

    def stop_owned_server(self) -> None:
        """End the server."""
        self._launcher.stop()


def build_environment(python: str) -> dict[str, str]:
    """Return the environment of a server: ours, without what belongs to a rank or to another Python."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    for name in _RANK_VARIABLES if python == sys.executable else (*_RANK_VARIABLES, "PYTHONPATH"):
        variables.pop(name, None)
    return variables
