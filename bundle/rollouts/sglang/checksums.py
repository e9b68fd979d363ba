"""What the checksums of a server must be after a sync, by a helper process in the server's Python."""

import json
import logging
import os
import select
import signal
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from bundle.errors import JobFailed
from bundle.rollouts.sglang import hashing
from bundle.rollouts.sglang.server import build_environment
from bundle.weight_sync.transports.ipc import Bucket

_log = logging.getLogger(__name__)


class ExpectedChecksumSource(Protocol):
    """Computes what the checksums of a server must be after a version."""

    def compute_expected_checksums(
        self, directory: Path | None, checksums: Mapping[str, str]
    ) -> Mapping[str, str]:
        """Return those of the tensors in `checksums`, as far as they are known.

        The version lies in the files of `directory`; None: in the buckets since the last call.
        """

    def submit_bucket(self, bucket: Bucket) -> None:
        """Take a bucket of the version."""

    def close(self) -> None:
        """End what computes."""


class FirstReplicaChecksums:
    """Expects of all replicas what the first one reports: where no other checksums can be computed."""

    def __init__(self) -> None:
        self._checksums: dict[Path | None, Mapping[str, str]] = {}

    def compute_expected_checksums(
        self, directory: Path | None, checksums: Mapping[str, str]
    ) -> Mapping[str, str]:
        """Return the checksums that were reported first for this version."""
        return self._checksums.setdefault(directory, checksums)

    def submit_bucket(self, bucket: Bucket) -> None:
        """Forget the version of earlier buckets."""
        self._checksums.pop(None, None)

    def close(self) -> None:
        """Do nothing."""


class ExpectedHashHelper:
    """Computes checksums in a helper process, started by the first call (`ExpectedChecksumSource`)."""

    def __init__(self, python: str, seconds: float) -> None:
        """`seconds` limit a call."""
        self._python, self._seconds = python, seconds
        self._process: subprocess.Popen[str] | None = None
        self._cache: tuple[Path | None, frozenset[str], Mapping[str, str]] | None = None
        self._lock = threading.Lock()  # replicas ask at once

    def compute_expected_checksums(
        self, directory: Path | None, checksums: Mapping[str, str]
    ) -> Mapping[str, str]:
        """Return the checksums of the tensors in `checksums`, as far as they follow from what was sent.

        Raise JobFailed where the helper fails, or where it knows none of them.
        """
        with self._lock:
            names = frozenset(checksums)
            if self._cache is None or self._cache[:2] != (directory, names):
                self._cache = directory, names, self._compute(directory, names)
            return self._cache[2]

    def submit_bucket(self, bucket: Bucket) -> None:
        """Copy a bucket to the memory of the helper. Raise JobFailed where it cannot open it."""
        with self._lock:
            self._cache = None
            if error := self._ask({"bucket": bucket.share()}).get("error"):
                self.close()
                raise JobFailed(f"the checksum helper cannot open a bucket ({error}).")

    def close(self) -> None:
        """End the helper."""
        if self._process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()
        self._process = None

    def _compute(self, directory: Path | None, names: frozenset[str]) -> Mapping[str, str]:
        is_first = self._process is None
        reply = self._ask({"directory": str(directory) if directory else None, "names": sorted(names)})
        expected: Mapping[str, str] = reply.get("checksums", {})
        if not expected:
            self.close()
            raise JobFailed(f"no checksum can be computed ({reply.get('error', 'no name is known')}).")
        if is_first and (unknown := sorted(names - expected.keys())):
            _log.warning(
                "cannot compute the checksums of %d of the server's %d tensors from the files, such as %s",
                len(unknown),
                len(names),
                unknown[0],
            )
        return expected

    def _ask(self, task: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._process = subprocess.Popen(
                [self._python, "-P", hashing.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=build_environment(self._python),
                start_new_session=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
            if select.select([self._process.stdout], [], [], self._seconds)[0]:
                reply = json.loads(self._process.stdout.readline())
                return reply if isinstance(reply, dict) else {}
        return {"error": f"the helper ended, or took more than {self._seconds:g} s"}
