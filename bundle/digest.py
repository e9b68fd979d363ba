"""Short digests of plain values, by which two parties find out that they have the same."""

import hashlib
import json


def of_json(value: object) -> str:
    """16 hexadecimal digits over a value's JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
