"""The process that renders chat templates, within limits of time and memory: `rendering` run as a script."""

import json
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bundle.data import rendering
from bundle.errors import JobFailed, UsageError

Reply = dict[str, Any]


class TemplateProcess:
    """Renders one template; its process starts at the first request, and again after a limit has ended it."""

    def __init__(self, origin: str, source: str, variables: dict[str, Any], today: str | None) -> None:
        """Prepare the first line for the process. `origin` says in messages where the template comes from."""
        self._origin, self._overruns = origin, 0
        self._template = json.dumps({"source": source, "variables": variables, "today": today})
        self._process: subprocess.Popen[str] | None = None

    def render_requests(self, requests: Sequence[str]) -> list[Reply]:
        """Return a reply for each request, which is JSON.

        Raises UsageError for a template that cannot be read, and where several rows take too long.
        """
        replies: list[Reply] = []
        while len(replies) < len(requests):
            replies += self._render_until_timeout(requests[len(replies) :])
        if replies and (reason := replies[0].get("unusable")):
            raise UsageError(f"data.template: {self._origin} cannot be read: {reason}. Correct it.")
        return replies

    def _render_until_timeout(self, requests: Sequence[str]) -> list[Reply]:
        """Return a reply for each request, up to the one that takes too long."""
        if self._process is None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write("\n".join([str(len(requests)), *requests, ""]))
            process.stdin.flush()
        except BrokenPipeError:  # its status says why it ended
            pass
        replies: list[Reply] = []
        while len(replies) < len(requests) and (line := process.stdout.readline()):
            replies.append(json.loads(line))
        if len(replies) < len(requests):
            self._process = None
            replies.append(self._raise_unless_first_overrun(process.wait()))
        return replies

    def _raise_unless_first_overrun(self, status: int) -> Reply:
        """Return the reply for a row at which the process has ended."""
        if status != -signal.SIGPROF:
            raise JobFailed(f"{self._origin}: the process that renders it ended with status {status}")
        self._overruns += 1
        reason = f"the chat template takes more than {rendering.MAX_RENDERING_CPU_SECONDS} s of computing"
        if self._overruns > 1:
            raise UsageError(f"data.template: {reason} for several rows ({self._origin}). Correct its loops.")
        return {"corrupt": reason}

    def _start(self) -> "subprocess.Popen[str]":
        # -P: modules beside the script do not hide those of the standard library.
        command = [sys.executable, "-P", str(Path(rendering.__file__))]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, encoding="ascii")
        weakref.finalize(self, _kill_process, process)
        assert process.stdin is not None
        process.stdin.write(f"{self._template}\n")
        return process


def _kill_process(process: "subprocess.Popen[str]") -> None:
    """Let the process read the end of its requests."""
    process.kill()
    process.communicate()
