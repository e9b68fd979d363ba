"""The events of `train --json`, one JSON object a line: the launcher writes the first and the last.

Rank 0 writes the others to its standard output, from which the launcher takes them.
"""

import json
import os
import sys
import time
from typing import Any

# Set for ranks whose launcher waits for events.
LISTENER_FLAG_VARIABLE = "BUNDLE_EVENTS"
_EVENT_PREFIX = '{"event": '


def has_listener() -> bool:
    """Return whether the launcher of this rank waits for events."""
    return LISTENER_FLAG_VARIABLE in os.environ


def print_event(event: str, **values: Any) -> None:
    """Write one event to standard output. The values contain only finite numbers."""
    document = {"event": event, "time": round(time.time(), 3), **values}
    print(json.dumps(document, allow_nan=False), flush=True)


def print_event_or_log_line(line: str, prefix: str) -> None:
    """Write an event of a rank to standard output, and any other line to standard error, behind `prefix`."""
    if line.startswith(_EVENT_PREFIX):
        print(line, flush=True)
    else:
        print(prefix + line, file=sys.stderr, flush=True)
