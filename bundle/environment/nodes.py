"""In what the nodes of a cluster differ, of what `doctor --json` printed on each: mixed nodes break jobs."""

import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bundle import files
from bundle.environment.packages import Stack
from bundle.errors import UsageError

_GIB = 1 << 30
_SHOWN = 3  # names of nodes
_UNSAID = "nothing"
# What no two machines have in common, or what is no fact about a machine.
_OWN = {"identity", "index", "reason", "notes"}
# In bytes: the same machines differ by what the firmware keeps.
_ABOUT = {"memory", "shared_memory"}


def described(stack: Stack) -> dict[str, Any]:
    """What a report has beside hardware and findings, so that it can be compared: all that jobs depend on."""
    return {
        "node": socket.gethostname(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {
            package.name: f"{package.version}{f' at {package.commit}' if package.commit else ''}"
            for package in stack.packages()
        },
    }


def read(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The reports in these files, by the names of their nodes. Raises UsageError with what is none."""
    found: dict[str, dict[str, Any]] = {}
    wrong = []
    for path in paths:
        report = files.json_object(path, "write it with `mcore-bundle doctor --json`")
        if not isinstance(report.get("hardware"), dict) or not isinstance(report.get("packages"), dict):
            wrong.append(f"{path}: not what `mcore-bundle doctor --json` printed")
        name = str(report.get("node") or path.stem)[:64]
        found[f"{name} ({path})" if name in found else name] = report
    if wrong or len(found) < 2:
        raise UsageError("doctor --compare takes two reports or more", wrong)
    return found


def differences(reports: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What differs, a line each: every value and the nodes that have it, that of most nodes first."""
    facts = {node: dict(_facts("", _compared(report))) for node, report in reports.items()}
    for name in sorted({name for of_node in facts.values() for name in of_node}):
        holders: dict[str, list[str]] = {}
        for node, of_node in facts.items():
            holders.setdefault(of_node.get(name, _UNSAID), []).append(node)
        if len(holders) > 1:
            most_first = sorted(holders.items(), key=lambda item: -len(item[1]))
            said = "; ".join(f"{value} ({_listed(nodes)})" for value, nodes in most_first)
            yield files.printable(f"{name}: {said}")


def _compared(report: Mapping[str, Any]) -> dict[str, Any]:
    wrong = [
        each for each in report.get("findings", ()) if isinstance(each, dict) and each.get("level") == "fail"
    ]
    return {
        "findings": {str(each.get("subject")): each.get("cause") for each in wrong},
        **{name: report.get(name) for name in ("hardware", "image", "kernel", "packages", "python")},
    }


def _facts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Every single value of a report by its whole name; of a fact that has its reason, the value alone."""
    if isinstance(value, dict) and set(value) == {"value", "reason"}:
        value = value["value"]
    if isinstance(value, dict):
        for key, part in value.items():
            if key not in _OWN:
                yield from _facts(f"{name}.{key}" if name else str(key), part)
    elif isinstance(value, list):
        yield f"{name}.count", str(len(value))
        for number, part in enumerate(value):
            yield from _facts(f"{name}.{number}", part)
    elif value is not None:
        about = name.rpartition(".")[2] in _ABOUT and isinstance(value, int | float)
        yield name, f"{value / _GIB:.0f} GiB" if about else str(value)[:200]


def _listed(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else ""
    return ", ".join(nodes[:_SHOWN]) + more
