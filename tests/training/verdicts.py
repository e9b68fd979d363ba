"""What a launch leaves of its end: the verdict of a node, and the step after which the next one went on."""

import json
import re
from pathlib import Path
from typing import Any

from bundle.launch import verdict


def read_verdict(directory: Path, node: int = 0, launch: int = 1) -> dict[str, Any]:
    """Return the verdict on a launch of a node of the run in `directory`."""
    folder = directory / "logs" / f"node-{node}" / str(launch)
    values: dict[str, Any] = json.loads((folder / verdict.FILE_NAME).read_text())
    return values


def find_resumed_steps(said: str) -> list[int]:
    """Return the steps after which runs went on, by what they said."""
    return [int(step) for step in re.findall(r"after step (\d+)", said)]
