"""What a run directory tells about its run. Its files are data from outside: bounded, most may be missing."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundle.errors import UsageError
from bundle.files import content

# Points of a curve that are drawn. Of more, the lowest and highest of each stretch stay: they are looked for.
POINTS = 2000
_NUMBERS, _FILE = 1 << 28, 1 << 24  # bytes of metrics.jsonl (millions of reports), and of any other file


@dataclass(frozen=True)
class Curve:
    """One number over the steps of a run, in their order."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def drawn(self) -> "Curve":
        """The curve with at most `POINTS` points."""
        count = len(self.steps)
        if count <= POINTS:
            return self
        length = -(-2 * count // POINTS)
        stretches = (range(at, min(at + length, count)) for at in range(0, count, length))
        kept = sorted({pick(s, key=self.values.__getitem__) for s in stretches for pick in (min, max)})
        return Curve(tuple(self.steps[at] for at in kept), tuple(self.values[at] for at in kept))


@dataclass(frozen=True)
class Run:
    """A run as its directory has it."""

    name: str
    curves: Mapping[str, Curve]
    plan: Mapping[str, Any]
    versions: Mapping[str, Any]
    result: Mapping[str, Any]
    unread: tuple[str, ...]  # what there was to read and could not be

    def planned(self, *keys: str) -> Any:
        """A value of the plan by its keys, None where there is none."""
        found: Any = self.plan
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found


def read(directory: Path) -> Run:
    """The run in `directory`. Raises UsageError where no run has reported anything."""
    unread: list[str] = []
    numbers = directory / "metrics.jsonl"
    try:
        curves = _curves(content(numbers, _NUMBERS), unread)
    except OSError as error:
        raise UsageError(
            f"{numbers}: {error.strerror or error}; give the directory of a run, such as runs/NAME"
        ) from error
    if not curves:
        raise UsageError(f"{numbers}: no numbers yet: a run reports every train.log_interval steps")
    job, versions, result = (
        _object(directory / f"{name}.json", unread) for name in ("job", "versions", "result")
    )
    plan = job.get("plan")
    planned = {**(plan if isinstance(plan, dict) else {}), "recipe": job.get("recipe")} if job else {}
    return Run(directory.resolve().name, curves, planned, versions, result, tuple(unread))


def _curves(data: bytes, unread: list[str]) -> dict[str, Curve]:
    """The curves of a metrics.jsonl; of a step that is there twice, after a resume, the last one counts."""
    seen: dict[str, dict[int, float]] = {}
    broken = 0
    for line in data.splitlines():
        report = _parsed(line)
        step = report.pop("step", None) if isinstance(report, dict) else None
        if type(step) is not int:
            broken += bool(line.strip())
            continue
        for name, value in report.items():
            if name != "time" and type(value) in (int, float):
                seen.setdefault(name, {})[step] = float(value)
    if broken:
        unread.append(f"metrics.jsonl: {broken} lines are no report")
    return {name: Curve(*zip(*sorted(values.items()), strict=True)) for name, values in seen.items()}


def _object(path: Path, unread: list[str]) -> dict[str, Any]:
    """The JSON object in a file; an empty one where there is no file, or no object in it."""
    try:
        found = _parsed(content(path, _FILE))
    except FileNotFoundError:
        return {}
    except OSError as error:
        unread.append(f"{path.name}: {error.strerror or error}")
        return {}
    if not isinstance(found, dict):
        unread.append(f"{path.name}: no JSON object")
        return {}
    return found


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
