"""The joint check of several nodes: where they meet, how their links perform, which nodes pass.

A node with a defect of its own reports it and takes no part in measurements.
"""

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bundle import files
from bundle.launch.outcomes import get_node_name
from bundle.launch.rendezvous import Rendezvous

# A node whose best link carries less than this share of the usual slows down every collective.
LEAST_BANDWIDTH_SHARE = 0.5
PREFLIGHT_FOLDER = "preflight"
PASSING, FAILING = "passing.txt", "failing.txt"


@dataclass(frozen=True)
class LinkWorker:
    """The process of one device: `kind` is torch's name of the device, `address` is that of node 0.

    The processes of a single node meet in the file `address`. `unfit` are the node's own defects. `wait` is
    the limit for nodes to come [s], `seconds` the limit for measurements [s].
    """

    kind: str
    local_rank: int
    per_node: int
    nodes: int
    node_rank: int
    address: str
    port: int
    unfit: str
    wait: float
    seconds: float
    quick: bool
    name: str

    @classmethod
    def from_argument(cls, argument: str) -> "LinkWorker":
        """Return the worker in a text of `argument`."""
        return cls(**json.loads(argument))

    @property
    def argument(self) -> str:
        """The worker as one word of a command line."""
        return json.dumps(asdict(self))


def describe_link_workers(
    kind: str,
    per_node: int,
    rendezvous: Rendezvous,
    store_file: Path,
    *,
    unfit: str,
    wait: float,
    seconds: float,
    quick: bool,
) -> Iterator[LinkWorker]:
    """Yield the processes of this node; they meet in `store_file` if there is no other node."""
    is_alone = rendezvous.nodes == 1
    for local_rank in range(per_node):
        yield LinkWorker(
            kind=kind,
            local_rank=local_rank,
            per_node=per_node,
            nodes=rendezvous.nodes,
            node_rank=rendezvous.node_rank,
            address=str(store_file) if is_alone else rendezvous.address,
            port=0 if is_alone else rendezvous.port or 0,
            unfit=unfit,
            wait=wait,
            seconds=seconds,
            quick=quick,
            name=get_node_name(),
        )


class RankLink(NamedTuple):
    """The measured speed of a link: GB/s of large messages, and microseconds of an exchange of small ones."""

    source: int  # a rank among those that were measured
    target: int
    bandwidth: float
    latency: float


class ProcessReport(NamedTuple):
    """The measurements of one process: the links to its device.

    `waits_for` is the rank that never sent anything. `stage` is its step when its time was over; empty where
    it completed all.
    """

    links: tuple[RankLink, ...] = ()
    stage: str = ""
    waits_for: int | None = None


def parse_link_report(values: Sequence[Any]) -> ProcessReport:
    """Return the report in these JSON values."""
    links, stage, waits_for = values
    return ProcessReport(tuple(RankLink(*fields) for fields in links), stage, waits_for)


def judge_links(
    reports: Mapping[int, ProcessReport], participants: Sequence[int], per_node: int
) -> dict[int, str]:
    """Return the defects of nodes by their number; `reports` are by rank, ordered as `participants`."""
    node_of_rank = [number for number in participants for _ in range(per_node)]
    wrong: dict[int, str] = {}
    for rank, number in enumerate(node_of_rank):
        if rank not in reports:
            wrong.setdefault(number, "its links were not measured: it sent no result within the time limit")
    silent = [
        (node_of_rank[report.waits_for], node_of_rank[rank])
        for rank, report in reports.items()
        if report.waits_for is not None
    ]
    wrong |= _find_blamed_nodes([pair for pair in silent if not set(pair) & set(wrong)])
    if not wrong and (stuck := sorted({report.stage for report in reports.values() if report.stage})):
        reason = f"its network test did not end within the time limit (last step: {' or '.join(stuck)})"
        wrong |= dict.fromkeys(participants, reason)
    return wrong or _find_nodes_with_slow_links(reports, node_of_rank)


def _find_blamed_nodes(silent: Sequence[tuple[int, int]]) -> dict[int, str]:
    """Return the nodes to blame for all silent links, chosen by the most silent links first."""
    wrong: dict[int, str] = {}
    remaining = list(silent)
    while remaining:
        counts = Counter(number for pair in remaining for number in set(pair))
        worst = max(counts, key=lambda number: (counts[number], number))
        peers = sorted({number for pair in remaining if worst in pair for number in pair} - {worst})
        where = f"between it and nodes {', '.join(map(str, peers))}" if peers else "between its devices"
        wrong[worst] = f"no data passed over the links {where}"
        remaining = [pair for pair in remaining if worst not in pair]
    return wrong


def _find_nodes_with_slow_links(
    reports: Mapping[int, ProcessReport], node_of_rank: Sequence[int]
) -> dict[int, str]:
    """Return nodes whose fastest link in one direction is slow; with two nodes, none can be blamed."""
    best: dict[int, dict[int, float]] = {}
    for report in reports.values():
        for link in report.links:
            source, target = node_of_rank[link.source], node_of_rank[link.target]
            if source != target:
                for number, way in ((source, 0), (target, 1)):
                    ways = best.setdefault(number, {})
                    ways[way] = max(ways.get(way, 0.0), link.bandwidth)
    speeds = {number: min(ways.values()) for number, ways in best.items()}
    usual = statistics.median_high(speeds.values()) if speeds else 0.0
    return {
        number: f"its links reach at most {speed:.3g} GB/s, but other nodes reach {usual:.3g} GB/s"
        for number, speed in speeds.items()
        if speed < LEAST_BANDWIDTH_SHARE * usual
    }


def list_partner_offsets(nodes: int) -> Iterator[int]:
    """Yield the distances from each node to its partners, in nodes: 1, 2, 4, ... below `nodes`."""
    distance = 1
    while distance < nodes:
        yield distance
        distance *= 2


def write_node_lists(folder: Path, node_defects: Iterable[tuple[str, str]]) -> None:
    """Write the names of nodes into two lists for `srun --nodelist=FILE` and `--exclude=FILE`.

    `node_defects` are names and defects. Raise JobFailed where nothing can be written.
    """
    pairs = list(node_defects)
    folder.mkdir(parents=True, exist_ok=True)
    for name, passing in ((PASSING, True), (FAILING, False)):
        listed = [node for node, defect in pairs if (not defect) is passing]
        files.write_text(folder / name, "".join(f"{node}\n" for node in listed))
