"""What the pods of a job write, as it comes: a stream that was cut is opened again where it was.

Lines come behind the time at which they were written, by which those that came before are known.
"""

import logging
import queue
import re
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from bundle.errors import LaunchUnavailable
from bundle.targets.kubernetes import client

_log = logging.getLogger(__name__)

# How many pods' logs are streamed at once: each is a connection that the API server holds.
MOST_STREAMS = 16
_SKEW_SECONDS = 60  # by which a node's clock may differ from ours
_ENDED_PHASES = ("Succeeded", "Failed")
# RFC 3339, of any zone, without the zeros at its end.
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)", re.ASCII)


class PodLogs:
    """What the pods of one namespace write that are named: every line once, of many pods some at a time."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._streams: dict[str, _PodLog] = {}

    def open(self, pods: Sequence[Any], *, last: bool = False) -> bool:
        """Opens what is not open of these pods, and returns whether more may come from them.

        All of a pod has come where a stream ends that was opened after the pod had, as `last` says of all.
        """
        flowing = sum(stream.is_open for stream in self._streams.values())
        for pod in pods:
            new = _PodLog(self._namespace, pod.metadata.name, self._lines)
            stream = self._streams.setdefault(pod.metadata.uid, new)
            if not (stream.is_complete or stream.is_open) and flowing < MOST_STREAMS:
                stream.open(has_ended=last or pod.status.phase in _ENDED_PHASES)
                flowing += 1
        return any(not self._streams[pod.metadata.uid].is_complete for pod in pods)

    def read_lines(self) -> Iterator[str]:
        """What has come since."""
        while not self._lines.empty():
            yield self._lines.get()


class _PodLog:
    """What one pod writes. `is_complete`: all of it has come, and no more will."""

    def __init__(self, namespace: str, pod: str, lines: "queue.SimpleQueue[str]") -> None:
        self.is_complete = False
        self._namespace, self._pod, self._lines = namespace, pod, lines
        self._thread: threading.Thread | None = None
        self._last_time, self._last_time_lines = 0, 0  # when the last line was, and how many lines then
        self._last_refusal = ""

    @property
    def is_open(self) -> bool:
        """Whether it is open."""
        return self._thread is not None and self._thread.is_alive()

    def open(self, *, has_ended: bool) -> None:
        """Reads on where it was cut, until it is again; of a pod that has `has_ended`, to its end."""
        self._thread = threading.Thread(target=self._read, args=(has_ended,), daemon=True)
        self._thread.start()

    def _read(self, has_ended: bool) -> None:
        rest, resume_point = "", (self._last_time, self._last_time_lines)
        try:
            for line in client.stream_log(self._namespace, self._pod, self._count_seconds_since()):
                stamp, _, text = line.partition(" ")
                if not line.endswith("\n"):
                    rest = text  # it was cut here, or the pod has ended so
                elif (line_time := _parse_nanoseconds(stamp)) is None:
                    self._lines.put(line)  # the server's own word
                elif resume_point[1] and line_time < resume_point[0]:
                    continue
                elif resume_point[1] and line_time == resume_point[0]:
                    resume_point = (line_time, resume_point[1] - 1)
                else:
                    resume_point = (0, 0)
                    self._last_time_lines = self._last_time_lines + 1 if line_time == self._last_time else 1
                    self._last_time = line_time
                    self._lines.put(text)
        except client.ServerUnreachable:
            return
        except LaunchUnavailable as error:
            if self._last_refusal != str(error):
                _log.warning("%s: %s", self._pod, error)
            self._last_refusal = str(error)
        if has_ended:
            if rest:
                self._lines.put(rest)
            self.is_complete = True

    def _count_seconds_since(self) -> int | None:
        """How many seconds ago the last line was, and some more."""
        if not self._last_time:
            return None
        return max(0, int(time.time() - self._last_time / 1e9)) + _SKEW_SECONDS


def _parse_nanoseconds(stamp: str) -> int | None:
    """The time that a stamp is, since 1970; None where it is none."""
    if (parts := _TIME.fullmatch(stamp)) is None:
        return None
    seconds = datetime.fromisoformat(parts[1] + parts[3]).timestamp()
    return int(seconds) * 10**9 + int((parts[2] or "").ljust(9, "0"))
