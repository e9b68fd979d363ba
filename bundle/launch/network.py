"""The network between nodes in a hang, as each node's kernel sees it.

A kernel sends again what another node does not acknowledge. The kernel of that node acknowledges also for a
stopped process. A connection without an answer means that the other node, or the network to it, is gone.
"""

import ipaddress
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bundle import files
from bundle.errors import format_count
from bundle.launch.outcomes import get_node_name

_TCP_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED, _RETRANSMISSION_TIMER = 1, 1
# Unanswered attempts in a row, each after twice the time of the one before: more than a second in all.
_LEAST_RETRANSMISSIONS = 3
_MAX_LISTED_PAIRS = 4  # pairs of nodes that a message names


@dataclass(frozen=True)
class NodeConnections:
    """The local addresses of a node's connections, and the other addresses that do not answer."""

    node: str
    addresses: tuple[str, ...] = ()
    unanswered: tuple[str, ...] = ()


def read_established_connections(tables: Sequence[Path] = _TCP_TABLES) -> NodeConnections:
    """Return the connections of this node's network namespace, from the kernel's tables."""
    addresses, unanswered = set(), set()
    for table in tables:
        for row in (files.read_text_if_small(table, limit=64 << 20) or "").splitlines()[1:]:
            _, local, remote, state, _, timer, attempts, *_ = row.split()
            if int(state, 16) != _ESTABLISHED:
                continue
            addresses.add(_decode_kernel_address(local))
            is_sent_again = int(timer.partition(":")[0], 16) == _RETRANSMISSION_TIMER
            if is_sent_again and int(attempts, 16) >= _LEAST_RETRANSMISSIONS:
                unanswered.add(_decode_kernel_address(remote))
    return NodeConnections(get_node_name(), tuple(sorted(addresses)), tuple(sorted(unanswered)))


def _decode_kernel_address(text: str) -> str:
    """Return the address in a kernel's table, whose 32-bit words are in the byte order of the machine."""
    digits = bytes.fromhex(text.partition(":")[0])
    words = struct.unpack(f">{len(digits) // 4}I", digits)
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def write_connections(folder: Path, node_rank: int) -> None:
    """Write this node's connections for the other nodes. Raise JobFailed where nothing can be written."""
    files.write_json(folder / f"network-{node_rank}.json", asdict(read_established_connections()))


def read(folder: Path) -> tuple[NodeConnections, ...]:
    """Return the connections that the nodes wrote, in the order of the nodes' ranks."""
    texts = {
        int(path.stem.partition("-")[2]): files.read_text_if_small(path)
        for path in files.list_matches(folder, "network-*.json")
    }
    values = [json.loads(text) for _, text in sorted(texts.items()) if text]
    return tuple(
        NodeConnections(node["node"], tuple(node["addresses"]), tuple(node["unanswered"])) for node in values
    )


def find_cut_pairs(connections: Sequence[NodeConnections]) -> list[tuple[str, str]]:
    """Return each pair of nodes of which one gets no answer from the other, in the order of `connections`."""
    nodes = {address: index for index, node in enumerate(connections) for address in node.addresses}
    pairs = {
        tuple(sorted((index, nodes[address])))
        for index, node in enumerate(connections)
        for address in node.unanswered
        if nodes.get(address, index) != index
    }
    return [(connections[first].node, connections[second].node) for first, second in sorted(pairs)]


def describe_pairs(pairs: Sequence[tuple[str, str]]) -> str:
    """Return a short list of pairs of nodes."""
    more = (
        f", and {format_count(len(pairs) - _MAX_LISTED_PAIRS, 'more pair')}"
        if len(pairs) > _MAX_LISTED_PAIRS
        else ""
    )
    return ", ".join(f"{first} and {second}" for first, second in pairs[:_MAX_LISTED_PAIRS]) + more
