"""The differences between the nodes of a cluster by their `doctor --json` reports: mixed nodes break jobs.

Values are compared, but not their `reason`, which names files that differ by container. The identities of
devices are left out, because no two nodes share them.
"""

import json
import platform
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundle import files
from bundle.environment.machine import Finding, Level
from bundle.environment.packages import InstalledPackages
from bundle.errors import UsageError, format_value

NOTHING = "nothing"
_UNIQUE_KEYS = {"identity", "reason", "node"}
_DEVICE_KEY = re.compile(r"^(hardware\.devices\.)(\d+)(\..*)$", re.DOTALL)
# The firmware reserves slightly different amounts of the same memory on different nodes.
_SIZE_TOLERANCE = 0.01
_SIZE_KEY = re.compile(r"\.(memory|shared_memory|locked_memory)$")
_MOST_LISTED_NODES = 8  # nodes in a line; of more, how many there are
_MOST_CHARACTERS = 300  # characters of what is somebody else's, in a line

_Values = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class NodeDifference:
    """A value on which nodes differ: each value with the nodes that have it, the most common value first."""

    key: str
    values: _Values

    @property
    def odd_nodes(self) -> tuple[str, ...]:
        """The nodes without the value that more than half of them have; all nodes if there is none."""
        names = [name for _, holders in self.values for name in holders]
        most = self.values[0][1]
        return tuple(name for name in names if 2 * len(most) <= len(names) or name not in most)

    def to_text(self) -> str:
        """Return one line, like "packages.torch: gpu3 has 2.10; gpu1, gpu2 have 2.11"."""
        parts = [
            f"{_format_nodes(holders)} {'has' if len(holders) == 1 else 'have'} {value[:_MOST_CHARACTERS]}"
            for value, holders in reversed(self.values)
        ]
        return f"{self.key[:_MOST_CHARACTERS]}: {'; '.join(parts)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the difference in a form that JSON can hold."""
        values = [{"value": value, "nodes": list(holders)} for value, holders in self.values]
        return {"key": self.key, "values": values, "odd": list(self.odd_nodes)}


def describe_node(stack: InstalledPackages) -> dict[str, Any]:
    """Return what a report says besides hardware and findings: everything that jobs depend on."""
    return {
        "node": socket.gethostname(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {
            package.name: f"{package.version}{f' at {package.commit}' if package.commit else ''}"
            for package in stack.list_packages()
        },
    }


def read_reports(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Return the reports of doctor by the name of their node.

    A report is under its file's name where it has no node name or where two reports have the same one. Raise
    UsageError with every file that is not a report of doctor, and for fewer than two files.
    """
    reports: dict[Path, dict[str, Any]] = {}
    wrong = []
    for path in dict.fromkeys(paths):
        try:
            reports[path] = _read_report(path)
        except UsageError as error:
            wrong.append(files.to_printable(error))
    if wrong:
        raise UsageError("these are not what `mcore-bundle doctor --json` prints:", wrong)
    if len(reports) < 2:
        raise UsageError("--compare takes what `doctor --json` printed on two nodes or more, a file of each")
    names = [report.get("node") for report in reports.values()]
    return {
        name if isinstance(name, str) and names.count(name) == 1 else str(path): report
        for (path, report), name in zip(reports.items(), names, strict=True)
    }


def _read_report(path: Path) -> dict[str, Any]:
    report = files.read_json_object(path)
    findings = report.get("findings")
    if report.get("schema") != 1 or not isinstance(findings, list):
        raise UsageError(f"{path}: has no findings of schema 1")
    for finding in findings:
        if not isinstance(finding, dict) or not all(
            isinstance(finding.get(name), str) for name in Finding._fields
        ):
            raise UsageError(f"{path}: holds {format_value(finding)}, which is no finding")
    return report


def compare_reports(reports: Mapping[str, Mapping[str, Any]]) -> list[NodeDifference]:
    """Return every difference between the nodes; `reports` are those of doctor, by node."""
    node_facts = {node: dict(_list_facts(report)) for node, report in reports.items()}
    groups: dict[tuple[str, str, _Values], list[str]] = {}
    for key in sorted({key for facts in node_facts.values() for key in facts}):
        values = _group_by_value(key, {node: facts.get(key, NOTHING) for node, facts in node_facts.items()})
        if len(values) > 1:
            # Devices that differ alike are one difference.
            device = _DEVICE_KEY.match(key)
            before, number, after = device.groups() if device else (key, "", "")
            groups.setdefault((before, after, values), []).append(number)
    return [
        NodeDifference(files.to_printable(f"{before}{','.join(numbers)}{after}"), values)
        for (before, after, values), numbers in groups.items()
    ]


def _group_by_value(key: str, facts: Mapping[str, Any]) -> _Values:
    """Return (value, the nodes that have it), the most common value first."""
    holders: dict[str, list[str]] = {}
    sizes: list[tuple[float, str]] = []
    for node, value in facts.items():
        text = files.to_printable(value if isinstance(value, str) else json.dumps(value))
        if _SIZE_KEY.search(key) and isinstance(value, int | float):
            same_size = (
                name
                for size, name in sizes
                if size == value or abs(size - value) < _SIZE_TOLERANCE * max(size, value)
            )
            text = next(same_size, text)
            sizes.append((value, text))
        holders.setdefault(text, []).append(node)
    ranked = sorted(holders.items(), key=lambda item: -len(item[1]))
    return tuple((value, tuple(nodes)) for value, nodes in ranked)


def _list_facts(report: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a report, without findings that are ok: these repeat other parts."""
    rest = [(key, value) for key, value in report.items() if key not in ("findings", "schema")]
    while rest:  # without recursion: how deep it nests is somebody else's
        key, value = rest.pop()
        if key.rpartition(".")[2] in _UNIQUE_KEYS:
            continue
        if isinstance(value, dict) and set(value) == {"value", "reason"}:
            rest.append((key, "unknown" if value["value"] is None else value["value"]))
        elif isinstance(value, dict):
            rest += [(f"{key}.{name}", inner) for name, inner in value.items()]
        elif isinstance(value, list) and all(isinstance(item, dict) for item in value):
            rest += [(f"{key}.{index}", inner) for index, inner in enumerate(value)]
        elif isinstance(value, list):
            yield from (
                (f"{key}, {item if isinstance(item, str) else format_value(item)}", "it") for item in value
            )
        else:
            yield key, "none" if value is None else value
    finding_lines: dict[str, set[str]] = {}
    for finding in report["findings"]:
        if finding["level"] != Level.OK:
            lines = finding_lines.setdefault(f"finding {finding['subject']}", set())
            lines.add(f"{finding['level']}: {finding['cause']}")
    yield from ((key, "; ".join(sorted(lines))) for key, lines in finding_lines.items())


def _format_nodes(nodes: Sequence[str]) -> str:
    if len(nodes) > _MOST_LISTED_NODES:
        return files.to_printable(f"{len(nodes)} nodes, {nodes[0]} to {nodes[-1]},")
    return files.to_printable(", ".join(nodes))
