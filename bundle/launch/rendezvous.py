"""Where this process stands, made of what the environment and the flags say (the rendezvous).

Anything that cannot be true is refused.
"""

import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from bundle.errors import UsageError
from bundle.launch.starters import STARTERS, Claim, Fact, Variables, claim, host_and_port

LOOPBACK = "127.0.0.1"
_DISCARD = 9  # a port; nothing is sent there
ALONE = "nobody set a rank or a node in the environment: one node, this machine"


class Rendezvous(NamedTuple):
    """Where this process stands, where the ranks meet, and who said so.

    A process that stands for a node starts that node's ranks; its `rank`, `local_rank` and `world_size` are
    None. `per_node` is None where nobody fixed the ranks of a node, `port` where a free one is to be taken.
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
        """Whether this process is one rank, rather than the starter of a node's ranks."""
        return self.rank is not None


def discover(
    environment: Mapping[str, str],
    *,
    nodes: int | None = None,
    node_rank: int | None = None,
    endpoint: str | None = None,
    planned: int = 1,
) -> Rendezvous:
    """Where this process stands; `nodes`, `node_rank` and `endpoint` are the values of the flags,
    `planned` the nodes of a job about which neither they nor a starter say anything (devices.nodes).

    Raises UsageError with every contradiction and every value that is not what its variable means.
    """
    env = Variables(environment)
    flags = _flags(env, nodes, node_rank, endpoint)
    claims: list[Claim] = []
    for starter in STARTERS:
        if found := starter(env):
            claims.append(found)
        if claims and "rank" in claims[0].said:
            break  # one rank of torchrun: whatever started torchrun is no longer about this process
    speaker = claims[0] if claims else Claim("none", ALONE, {})
    violations = [*env.violations, *speaker.contradictions(), *flags.contradictions()]
    violations += flags.against(speaker)
    for other in claims[1:]:
        violations += speaker.against(other)
    if not claims and env.has("RANK", "WORLD_SIZE") and "nodes" not in flags.said:
        violations.append(
            "RANK and WORLD_SIZE are set without LOCAL_RANK, so they may count pods or processes:"
            " say --nodes, --node-rank and --rendezvous"
        )
    answer = _merge(speaker, flags, claims[1:], planned)
    violations = violations or _gaps(answer, environment)
    if violations:
        raise UsageError(
            "which node or rank this is cannot be told: flags or variables are wrong, missing or contradict"
            " each other. Correct or unset what is listed",
            violations,
        )
    said = {name: fact.value for name, fact in answer.said.items()}
    # One node needs nobody from outside: its ranks meet where only this machine can reach them.
    inside = {"address": LOOPBACK, "port": None}
    where = said | inside if said["nodes"] == 1 and "rank" not in said else inside | said
    return Rendezvous(source=answer.source, reason=answer.reason, **where)


def _flags(env: Variables, nodes: int | None, node_rank: int | None, endpoint: str | None) -> Claim:
    if nodes is not None and nodes < 1:
        env.violations.append(f"--nodes {nodes} is not at least 1")
    if node_rank is not None and node_rank < 0:
        env.violations.append(f"--node-rank {node_rank} is below 0")
    where = host_and_port(endpoint) if endpoint is not None else None
    if endpoint is not None and where is None:
        env.violations.append(f"--rendezvous {endpoint[:80]!r} is not HOST:PORT")
    return claim(
        "flags",
        "said on the command line",
        nodes=Fact(nodes, "--nodes") if nodes is not None else None,
        node_rank=Fact(node_rank, "--node-rank") if node_rank is not None else None,
        address=Fact(where[0], "--rendezvous") if where else None,
        port=Fact(where[1], "--rendezvous") if where else None,
    )


def _merge(speaker: Claim, flags: Claim, others: list[Claim], planned: int) -> Claim:
    """The speaker's claim with its gaps filled, first by the flags, then by the other starters."""
    source, reason, said = speaker.source, speaker.reason, dict(speaker.said)
    if source == "none" and "nodes" in flags.said:
        names = dict.fromkeys(fact.said_by for fact in flags.said.values())
        source, reason = "flags", f"{', '.join(names)}: {flags.reason}"
    if "address" in flags.said and "rank" not in said:
        said = {
            name: fact for name, fact in said.items() if name not in ("address", "port")
        }  # a person's wins
    for each in (flags, *others):
        fills = ("nodes", "node_rank", "address", "port")
        said = {name: fact for name, fact in each.said.items() if name in fills} | said
    if "nodes" not in said and source == "none":
        said["nodes"] = Fact(planned, "devices.nodes")
    if "nodes" in said and said["nodes"].value == 1:
        said.setdefault("node_rank", Fact(0, said["nodes"].said_by))
    return Claim(source, reason, said)


def _gaps(answer: Claim, environment: Mapping[str, str]) -> list[str]:
    found, said = answer.contradictions(), answer.said
    if "nodes" not in said:
        return [*found, f"how many nodes there are is not said ({answer.reason}): say --nodes"]
    if said["nodes"].value == 1 and "rank" not in said:
        return found
    if "node_rank" not in said:
        found.append(f"{said['nodes']}, but which of them this is is not said: say --node-rank")
    if "address" not in said or "port" not in said:
        named = f"MASTER_ADDR={environment['MASTER_ADDR']!r} " if environment.get("MASTER_ADDR") else ""
        found.append(f"{said['nodes']}, but where they meet is not said {named}: say --rendezvous HOST:PORT")
    return found


def own_address(other: str) -> str:
    """The address of this machine by which it would speak to another; its name where that is not known."""
    with suppress(OSError):
        for family, kind, _, _, where in socket.getaddrinfo(other, _DISCARD, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as out:
                out.connect(where)  # sends nothing
                return str(out.getsockname()[0])
    return socket.gethostname()
