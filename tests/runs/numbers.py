"""What a run noted, without what no two runs have alike."""

import json
from typing import Any

# Times, rates and memory are the machine's, and differ from run to run.
_MACHINE = ("second", "flops", "mfu", "memory/", "straggler")


def learned(text: str) -> list[dict[str, Any]]:
    """The reports in a metrics.jsonl, of what was learned."""
    return [
        {k: v for k, v in json.loads(line).items() if k != "time" and not any(word in k for word in _MACHINE)}
        for line in text.splitlines()
    ]
