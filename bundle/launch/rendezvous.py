"""The place of this process among nodes and ranks, from the environment and the flags (the rendezvous).

Contradictions are refused.
"""

import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from bundle.errors import UsageError
from bundle.launch.starters import (
    STARTERS,
    Claim,
    SourcedValue,
    VariableReader,
    build_claim,
    parse_host_and_port,
)

LOOPBACK = "127.0.0.1"
_DISCARD_PORT = 9  # a port; nothing is sent there
ALONE_REASON = "the environment sets no rank and no node: one node, this machine"


class Rendezvous(NamedTuple):
    """The place of this process, the address where the ranks meet, and the source of both.

    A process that stands for a node starts that node's ranks; its `rank`, `local_rank` and `world_size` are
    None. `per_node` is None where the number of ranks per node is open, `port` where a free one is to be
    chosen.
    """

    nodes: int
    node_rank: int
    address: str
    port: int | None
    source: str
    reason: str
    per_node: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None

    @property
    def is_rank(self) -> bool:
        """True if this process is one rank, rather than the starter of a node's ranks."""
        return self.rank is not None


def discover(
    environment: Mapping[str, str],
    *,
    nodes: int | None = None,
    node_rank: int | None = None,
    endpoint: str | None = None,
    planned_nodes: int = 1,
) -> Rendezvous:
    """Return the place of this process.

    `nodes`, `node_rank` and `endpoint` are the values of the flags. `planned_nodes` is the number of nodes of
    the job (devices.nodes), which counts where neither flags nor a starter give one. Raise UsageError with
    every contradiction and every value that does not fit its variable.
    """
    env = VariableReader(environment)
    flags = _build_flags_claim(env, nodes, node_rank, endpoint)
    claims: list[Claim] = []
    for starter in STARTERS:
        if starter_claim := starter(env):
            claims.append(starter_claim)
        if claims and "rank" in claims[0].settings:
            break  # one rank of torchrun: the starter of torchrun does not describe this process
    first_claim = claims[0] if claims else Claim("none", ALONE_REASON, {})
    violations = [
        *env.violations,
        *first_claim.find_inconsistent_settings(),
        *flags.find_inconsistent_settings(),
    ]
    violations += flags.find_conflicts(first_claim)
    for other_claim in claims[1:]:
        violations += first_claim.find_conflicts(other_claim)
    if not claims and env.has("RANK", "WORLD_SIZE") and "nodes" not in flags.settings:
        violations.append(
            "RANK and WORLD_SIZE are set without LOCAL_RANK, so they may count pods or processes. Set"
            " --nodes, --node-rank and --rendezvous"
        )
    merged = _fill_claim_gaps(first_claim, flags, claims[1:], planned_nodes)
    violations = violations or _find_gaps(merged, environment)
    if violations:
        raise UsageError(
            "the node or rank of this process is unclear, because options or environment variables are wrong,"
            " missing or contradictory. Correct or unset them",
            violations,
        )
    values = {name: fact.value for name, fact in merged.settings.items()}
    # The ranks of a single node meet on loopback, where only this machine can reach them.
    loopback = {"address": LOOPBACK, "port": None}
    address_values = values | loopback if values["nodes"] == 1 and "rank" not in values else loopback | values
    return Rendezvous(source=merged.source, reason=merged.reason, **address_values)


def _build_flags_claim(
    env: VariableReader, nodes: int | None, node_rank: int | None, endpoint: str | None
) -> Claim:
    if nodes is not None and nodes < 1:
        env.violations.append(f"--nodes {nodes} is below 1")
    if node_rank is not None and node_rank < 0:
        env.violations.append(f"--node-rank {node_rank} is below 0")
    endpoint_value = parse_host_and_port(endpoint) if endpoint is not None else None
    if endpoint is not None and endpoint_value is None:
        env.violations.append(f"--rendezvous {endpoint[:80]!r} is not HOST:PORT")
    return build_claim(
        "flags",
        "set on the command line",
        nodes=SourcedValue(nodes, "--nodes") if nodes is not None else None,
        node_rank=SourcedValue(node_rank, "--node-rank") if node_rank is not None else None,
        address=SourcedValue(endpoint_value[0], "--rendezvous") if endpoint_value else None,
        port=SourcedValue(endpoint_value[1], "--rendezvous") if endpoint_value else None,
    )


def _fill_claim_gaps(
    first_claim: Claim, flags: Claim, other_claims: list[Claim], planned_nodes: int
) -> Claim:
    """Return the first claim with its gaps filled, first by the flags, then by the other starters."""
    source, reason, settings = first_claim.source, first_claim.reason, dict(first_claim.settings)
    if source == "none" and "nodes" in flags.settings:
        source_names = dict.fromkeys(fact.source for fact in flags.settings.values())
        source, reason = "flags", f"{', '.join(source_names)}: {flags.reason}"
    if "address" in flags.settings and "rank" not in settings:
        settings = {
            name: fact for name, fact in settings.items() if name not in ("address", "port")
        }  # a person's wins
    for later_claim in (flags, *other_claims):
        fillable = ("nodes", "node_rank", "address", "port")
        settings = {name: fact for name, fact in later_claim.settings.items() if name in fillable} | settings
    if "nodes" not in settings and source == "none":
        settings["nodes"] = SourcedValue(planned_nodes, "devices.nodes")
    if "nodes" in settings and settings["nodes"].value == 1:
        settings.setdefault("node_rank", SourcedValue(0, settings["nodes"].source))
    return Claim(source, reason, settings)


def _find_gaps(merged: Claim, environment: Mapping[str, str]) -> list[str]:
    gaps, settings = merged.find_inconsistent_settings(), merged.settings
    if "nodes" not in settings:
        return [*gaps, f"the number of nodes is not set ({merged.reason}). Set --nodes"]
    if settings["nodes"].value == 1 and "rank" not in settings:
        return gaps
    if "node_rank" not in settings:
        gaps.append(f"{settings['nodes']}, but the rank of this node is not set. Set --node-rank")
    if "address" not in settings or "port" not in settings:
        address = environment.get("MASTER_ADDR")
        named = f" (MASTER_ADDR={address!r} has no port)" if address else ""
        gaps.append(
            f"{settings['nodes']}, but the rendezvous of these nodes is not set{named}. Set --rendezvous"
            " HOST:PORT"
        )
    return gaps


def find_own_address(other: str) -> str:
    """Return this machine's address on the way to another one; its name where that is unknown."""
    with suppress(OSError):
        for family, kind, _, _, socket_address in socket.getaddrinfo(
            other, _DISCARD_PORT, type=socket.SOCK_DGRAM
        ):
            with suppress(OSError), socket.socket(family, kind) as out:
                out.connect(socket_address)  # sends nothing
                return str(out.getsockname()[0])
    return socket.gethostname()
