"""Run directories as training leaves them, made by hand."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write(directory: Path, reports: Iterable[Mapping[str, Any]], **files: Any) -> Path:
    """A run with these reports, and these files as JSON."""
    directory.mkdir(parents=True)
    lines = [json.dumps(report) for report in reports]
    (directory / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    if "plan" in files:  # which is a part of the job file, and the recipe another
        plan = dict(files.pop("plan"))
        files["job"] = {"recipe": plan.pop("recipe", None), "plan": plan}
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    return directory
