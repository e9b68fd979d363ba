"""How often running nodes ask a shared disk for something, so that each learns of the others.

python -m benchmarks.membership [--nodes N...]

All nodes of a job with spare nodes run `launch.node_registry` and `launch.nodes.PeerFailurePoll` in one
process, on a clock that moves by itself, while their ranks run. Python's audit events count the operations
in the shared folder. Ends with 1 where all nodes together make more than 50 operations a second.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

from bundle.launch import outcomes
from bundle.launch.node_registry import NodeRegistry, get_running_interval
from bundle.launch.nodes import PeerFailurePoll
from bundle.launch.rendezvous import Rendezvous

MOST_PER_SECOND = 50.0
EVENTS = ("open", "os.listdir", "os.scandir", "os.rename", "os.link", "os.remove", "os.mkdir")
STEP_SECONDS = 0.5
_INTERVALS = 3  # that are simulated


class Clock:
    """A clock that moves when it is told to [s]."""

    def __init__(self) -> None:
        self.now = 1000.0

    def read(self) -> float:
        """Return the time."""
        return self.now


class OperationCounter:
    """Counts the operations in a folder by their kind, while `is_on`."""

    def __init__(self, folder: Path) -> None:
        self.is_on, self.counts = False, Counter[str]()
        self._prefix = str(folder)
        sys.addaudithook(self._count)  # for the rest of this process

    def _count(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.is_on and event in EVENTS and str(arguments[0]).startswith(self._prefix):
            self.counts[event] += 1


def main() -> int:
    """Print a table; return 1 where a row has too many operations."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", nargs="+", type=int, default=[8, 128, 1024, 4096])
    print("| nodes | renames a second | listings a second | opened files a second | all |")
    print("|---|---|---|---|---|")
    failed = False
    for nodes in parser.parse_args().nodes:
        rates = measure_rates(nodes)
        listings = rates["os.listdir"] + rates["os.scandir"]
        whole = sum(rates.values())
        cells = (rates["os.rename"], listings, rates["open"], whole)
        print(f"| {nodes:,} | {' | '.join(f'{cell:.1f}' for cell in cells)} |", flush=True)
        failed |= whole > MOST_PER_SECOND
    return int(failed)


def measure_rates(nodes: int) -> Counter[str]:
    """Return the operations of all nodes a second by their kind, while their ranks run."""
    clock = Clock()
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory() as local,
        mock.patch("time.monotonic", clock.read),
    ):
        registries, peers = start_nodes(nodes, Path(folder), Path(local), clock)
        counter = OperationCounter(Path(folder))
        seconds = _INTERVALS * get_running_interval(nodes)
        counter.is_on = True
        for _ in range(int(seconds / STEP_SECONDS)):
            clock.now += STEP_SECONDS
            for registry, others in zip(registries, peers, strict=True):
                registry.send_heartbeat_if_due()
                others.has_failed_peer_after_poll()
        counter.is_on = False
    return Counter({event: count / seconds for event, count in counter.counts.items()})  # type: ignore[misc]


def start_nodes(
    nodes: int, folder: Path, local: Path, clock: Clock
) -> tuple[list[NodeRegistry], list[PeerFailurePoll]]:
    """Return the registry and the peers of each node after its ranks have met; they start one by one."""
    world = folder / "world-1"
    (world / outcomes.NODES_FOLDER).mkdir(parents=True)
    (local / outcomes.WORLD_FOLDER_PATH_FILE).write_text(str(world))
    registries = [NodeRegistry(folder / "roster", rank, f"gpu{rank}", "h") for rank in range(nodes)]
    for registry in registries:
        registry.update_entry(waits_for=1)
        (world / outcomes.NODES_FOLDER / f"{registry.own_entry.number}.json").touch()
    peers = []
    for rank, registry in enumerate(registries):
        clock.now += get_running_interval(nodes) / nodes
        registry.poll_if_due()
        registry.update_entry(waits_for=None)
        peers.append(PeerFailurePoll(local, Rendezvous(nodes, rank, "h", 29500, "", "")))
    return registries, peers


if __name__ == "__main__":
    sys.exit(main())
