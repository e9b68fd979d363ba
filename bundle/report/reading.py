"""JSON of files that may be damaged."""

import json
from typing import Any


def parse_json_or_none(data: bytes) -> Any:
    """Return the value of a JSON text; None where it is not JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
