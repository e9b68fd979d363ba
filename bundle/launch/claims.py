"""What a starter says in the environment: facts, each with the variable that said it, and every violation.

Host names, ports and endpoints are read here; what a shell or a parser could take for something else is
refused.
"""

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")

# torchrun's own default, which is what PET_MASTER_PORT means when it is not set.
DEFAULT_PORT = 29500

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_GROUP = re.compile(r"\[([0-9]+)[^][]*\]", re.ASCII)


def number(text: str) -> int | None:
    """The plain decimal number that `text` is, or None: no sign, blank or foreign digit."""
    return int(text) if _NUMBER.fullmatch(text) else None


def port(text: str) -> int | None:
    """A TCP port that a client can connect to, or None."""
    value = number(text)
    return value if value is not None and 0 < value < 2**16 else None


def host(text: str) -> str | None:
    """A host name, an IPv4 or an IPv6 address (brackets removed), or None."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        return str(ipaddress.ip_address(bare)) if "%" not in bare else None
    except ValueError:
        return text if len(text) <= 253 and _NAME.fullmatch(text) else None


def host_and_port(text: str) -> tuple[str, int] | None:
    """(host, port) of `HOST:PORT` or `[IPv6]:PORT`, or None."""
    name, colon, digits = text.rpartition(":")
    where, at = host(name), port(digits)
    if not colon or where is None or at is None or (":" in where) != name.startswith("["):
        return None
    return where, at


def first_of(nodelist: str) -> str | None:
    """The first host of a SLURM node list such as `gpu[001-003,10],login1`, or None.

    Only the first host of a list is ever needed, and `scontrol show hostnames` is fatal without a slurm.conf.
    """
    if len(nodelist) > 1_000_000:
        return None
    outside, depth = "", 0
    for letter in nodelist:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            break
        outside += letter
    return host(_GROUP.sub(r"\1", outside))


class Fact(NamedTuple, Generic[T]):
    """A value and the variable or flag that said it."""

    value: T
    said_by: str


@dataclass(frozen=True)
class Claim:
    """Everything that one starter says about this process; None where it says nothing."""

    source: str
    reason: str
    nodes: Fact[int] | None = None
    node_rank: Fact[int] | None = None
    per_node: Fact[int] | None = None
    world_size: Fact[int] | None = None
    rank: Fact[int] | None = None
    local_rank: Fact[int] | None = None
    address: Fact[str] | None = None
    port: Fact[int] | None = None

    def contradictions(self) -> list[str]:
        """What cannot be true together, naming both variables."""
        found = []
        for index, size in (("rank", "world_size"), ("local_rank", "per_node"), ("node_rank", "nodes")):
            i, n = getattr(self, index), getattr(self, size)
            if i and n and i.value >= n.value:
                found.append(f"{i.said_by}={i.value} is not below {n.said_by}={n.value}")
        nodes, per_node, world = self.nodes, self.per_node, self.world_size
        if nodes and per_node and world and nodes.value * per_node.value != world.value:
            found.append(
                f"{world.said_by}={world.value} is not {nodes.said_by}={nodes.value}"
                f" times {per_node.said_by}={per_node.value}"
            )
        rank, local, node = self.rank, self.local_rank, self.node_rank
        if not found and rank and local and node and per_node:
            expected = node.value * per_node.value + local.value
            if rank.value != expected:
                found.append(
                    f"{rank.said_by}={rank.value}, but {node.said_by}={node.value} and {local.said_by}="
                    f"{local.value} make it {expected}: number the ranks node by node"
                )
        return found

    def against(self, other: "Claim") -> list[str]:
        """Where two starters disagree about the nodes, naming both variables."""
        found = []
        for name in ("nodes", "node_rank"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours and theirs and ours.value != theirs.value:
                found.append(
                    f"{ours.said_by}={ours.value} contradicts {theirs.said_by}={theirs.value}:"
                    " unset or correct one of them"
                )
        return found

    def facts(self) -> dict[str, Fact[Any]]:
        """What is said, by name."""
        return {f.name: fact for f in fields(self) if isinstance(fact := getattr(self, f.name), Fact)}

    def names(self) -> str:
        """The variables that speak here, in one line."""
        return ", ".join(dict.fromkeys(fact.said_by for fact in self.facts().values()))


class Variables:
    """Reads an environment and collects what is wrong in it, so that all of it can be said at once."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.violations: list[str] = []

    def has(self, *names: str) -> bool:
        """Whether all of `names` are set to something."""
        return all(self.environment.get(name) for name in names)

    def text(self, name: str) -> str:
        """The value, empty when it is not set."""
        return self.environment.get(name, "")

    def count(self, name: str, least: int = 0) -> Fact[int] | None:
        """A whole number of at least `least`."""

        def parse(text: str) -> int | None:
            value = number(text)
            return value if value is not None and value >= least else None

        return self._read(name, parse, f"a whole number from {least}")

    def host(self, name: str) -> Fact[str] | None:
        """A host name or an IP address."""
        return self._read(name, host, "a host name or an IP address")

    def port(self, name: str) -> Fact[int] | None:
        """A TCP port."""
        return self._read(name, port, "a port from 1 to 65535")

    def refuse(self, name: str, expected: str) -> None:
        """Adds the violation that the value of `name` is not `expected`."""
        self.violations.append(f"{name}={self.text(name)[:80]!r} is not {expected}")

    def require(self, fact: Fact[T] | None, name: str, meaning: str) -> Fact[T] | None:
        """`fact`, adding a violation when nothing was said (a bad value is a violation already)."""
        if fact is None and not self.has(name):
            self.violations.append(f"{name} is not set: {meaning}")
        return fact

    def _read(self, name: str, parse: Callable[[str], T | None], expected: str) -> Fact[T] | None:
        if not self.has(name):
            return None
        value = parse(self.text(name))
        if value is None:
            self.refuse(name, expected)
            return None
        return Fact(value, name)
