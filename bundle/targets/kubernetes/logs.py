"""The lines that the pods of a job write, as they come; a stream that was cut is reopened where it was.

The server puts a time before each line, by which lines that came before are recognized.
"""

import logging
import queue
import re
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from bundle.errors import TargetUnavailable
from bundle.targets.kubernetes import client

_log = logging.getLogger(__name__)

# The most pods whose logs are streamed at once; each holds a connection of the API server.
MOST_STREAMS = 16
_SKEW_SECONDS = 60  # the largest difference between a node's clock and ours
_ENDED_PHASES = ("Succeeded", "Failed")
# RFC 3339, of any zone, without the zeros at its end.
_TIME_PATTERN = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)", re.ASCII)


class PodLogStreams:
    """The lines of named pods in one namespace: each line once; at most MOST_STREAMS pods at a time."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._streams: dict[str, _PodLog] = {}

    def has_incomplete_logs_after_reopening(self, pods: Sequence[Any], *, last: bool = False) -> bool:
        """Open the logs of these pods that are not open, and return whether more lines may come.

        A pod's log is complete when a stream ends that was opened after the pod had ended. `last` says that
        all of these pods have ended.
        """
        flowing = sum(stream.is_open for stream in self._streams.values())
        for pod in pods:
            new = _PodLog(self._namespace, pod.metadata.name, self._lines)
            stream = self._streams.setdefault(pod.metadata.uid, new)
            if not (stream.is_complete or stream.is_open) and flowing < MOST_STREAMS:
                stream.start_reader_thread(has_ended=last or pod.status.phase in _ENDED_PHASES)
                flowing += 1
        return any(not self._streams[pod.metadata.uid].is_complete for pod in pods)

    def read_new_lines(self) -> Iterator[str]:
        """Yield the lines that have come since the last call."""
        while not self._lines.empty():
            yield self._lines.get()


class _PodLog:
    """The lines of one pod. `is_complete`: all lines have come, and no more will."""

    def __init__(self, namespace: str, pod: str, lines: "queue.SimpleQueue[str]") -> None:
        self.is_complete = False
        self._namespace, self._pod, self._lines = namespace, pod, lines
        self._thread: threading.Thread | None = None
        self._last_time, self._last_time_lines = 0, 0  # of the last line; lines with that time
        self._last_refusal = ""

    @property
    def is_open(self) -> bool:
        """True if a thread reads the log."""
        return self._thread is not None and self._thread.is_alive()

    def start_reader_thread(self, *, has_ended: bool) -> None:
        """Continue reading where the stream was cut, until it is cut again.

        Read to the end where the pod `has_ended`.
        """
        self._thread = threading.Thread(target=self._read_into_queue, args=(has_ended,), daemon=True)
        self._thread.start()

    def _read_into_queue(self, has_ended: bool) -> None:
        rest, resume_point = "", (self._last_time, self._last_time_lines)
        try:
            for line in client.stream_timestamped_log(
                self._namespace, self._pod, self._compute_since_seconds()
            ):
                stamp, _, text = line.partition(" ")
                if not line.endswith("\n"):
                    rest = text  # the stream was cut here, or the pod's last line has no end
                elif (line_time := _parse_nanoseconds(stamp)) is None:
                    self._lines.put(line)  # a message of the server
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
        except TargetUnavailable as error:
            if self._last_refusal != str(error):
                _log.warning("%s: %s", self._pod, error)
            self._last_refusal = str(error)
        if has_ended:
            if rest:
                self._lines.put(rest)
            self.is_complete = True

    def _compute_since_seconds(self) -> int | None:
        """Return the seconds since the last line plus the clock skew; None where there is no line yet."""
        if not self._last_time:
            return None
        return max(0, int(time.time() - self._last_time / 1e9)) + _SKEW_SECONDS


def _parse_nanoseconds(stamp: str) -> int | None:
    """Return the time of a stamp in nanoseconds since 1970; None where it is not a stamp."""
    if (parts := _TIME_PATTERN.fullmatch(stamp)) is None:
        return None
    seconds = datetime.fromisoformat(parts[1] + parts[3]).timestamp()
    return int(seconds) * 10**9 + int((parts[2] or "").ljust(9, "0"))
