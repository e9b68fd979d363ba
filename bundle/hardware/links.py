"""What connects the devices: the topology matrix of nvidia-smi or npu-smi, and RDMA ports from sysfs."""

import re
from collections.abc import Sequence
from itertools import combinations

from bundle.hardware.facts import NUMBER, Fact
from bundle.hardware.machine import Machine

# From the weakest up, as both tools' legends define them; NV<n> (NVLink lanes) ranks above by n.
_RANKS = ("NA", "SYS", "NODE", "PHB", "PXB", "PIX", "HCCS_SW", "HCCS", "SIO")
_ESCAPES = r"\x1b\[[0-9;]*m"


def weakest(matrix: Fact[str], prefix: str, numbers: Sequence[int]) -> Fact[str]:
    """The weakest link between two of the devices `numbers` in a `topo` matrix of `<prefix><number>` rows."""
    if len(numbers) < 2:
        return Fact(None, "one device has no link to another")
    if matrix.value is None:
        return Fact(None, matrix.reason)
    table = _table(matrix.value, prefix)
    pairs = [table.get((a, b)) for a, b in combinations(numbers, 2)]
    known = [link for link in pairs if link is not None]
    if not known:
        return Fact(None, f"{matrix.reason}: no matrix of {prefix} rows in the answer")
    return Fact(min(known, key=_strength), f"{matrix.reason}: the weakest of {len(known)} pairs")


def _table(text: str, prefix: str) -> dict[tuple[int, int], str]:
    columns: list[int] = []
    links: dict[tuple[int, int], str] = {}
    for line in re.sub(_ESCAPES, "", text).splitlines():
        words = line.split()
        numbers = [int(word[len(prefix) :]) for word in words if re.fullmatch(prefix + NUMBER, word)]
        if len(numbers) > 1:
            columns = numbers  # the header names every device, a row only its own
        elif numbers:
            for column, link in zip(columns, words[1:], strict=False):
                links[numbers[0], column] = link
    return links


def _strength(link: str) -> int:
    if match := re.fullmatch(rf"NV({NUMBER})", link):
        return 100 + int(match[1])
    return _RANKS.index(link) if link in _RANKS else 0


def rdma(machine: Machine) -> Fact[tuple[str, ...]]:
    """The active RDMA ports, "mlx5_0/1: InfiniBand 400 Gb/sec (4X NDR)"; an empty tuple: there is none."""
    base = "/sys/class/infiniband"
    ports: list[str] = []
    idle = 0
    for device in machine.names(base):
        for port in machine.names(f"{base}/{device}/ports"):
            at = f"{base}/{device}/ports/{port}"
            state, layer, rate = (
                (machine.read(f"{at}/{name}").value or "").strip() for name in ("state", "link_layer", "rate")
            )
            if "ACTIVE" in state:
                ports.append(f"{device}/{port}: {layer or 'unknown layer'} {rate}".rstrip())
            else:
                idle += 1
    if not ports:
        return Fact((), f"{base} has no active port" + (f" ({idle} down)" if idle else ""))
    if not any(name.startswith("uverbs") for name in machine.names("/dev/infiniband")):
        return Fact(
            (),
            f"{base} has {len(ports)} active port(s), but /dev/infiniband/uverbs* is not in this container",
        )
    return Fact(tuple(ports), base)
