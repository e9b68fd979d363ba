"""Where this process stands, made of what the environment and the flags say (the rendezvous).

Anything that cannot be true is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bundle.errors import UsageError
from bundle.launch.claims import Claim, Fact, Variables, host_and_port
from bundle.launch.starters import STARTERS

LOOPBACK = "127.0.0.1"
ALONE = "nobody set a rank or a node in the environment: one node, this machine"


@dataclass(frozen=True)
class Rendezvous:
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
        if claim := starter(env):
            claims.append(claim)
        if claims and claims[0].rank:
            break  # one rank of torchrun: whatever started torchrun is no longer about this process
    speaker = claims[0] if claims else Claim("none", ALONE)
    violations = [*env.violations, *speaker.contradictions(), *flags.contradictions()]
    violations += flags.against(speaker)
    for other in claims[1:]:
        violations += speaker.against(other)
    if not claims and env.has("RANK", "WORLD_SIZE") and flags.nodes is None:
        violations.append(
            "RANK and WORLD_SIZE are set without LOCAL_RANK, so they may count pods or processes:"
            " say --nodes, --node-rank and --rendezvous"
        )
    answer = _merge(speaker, flags, claims[1:], planned)
    if not violations:
        violations = _gaps(answer, environment)
    if violations:
        raise UsageError("the environment and the flags do not say where this process stands", violations)
    return _settle(answer)


def _flags(env: Variables, nodes: int | None, node_rank: int | None, endpoint: str | None) -> Claim:
    if nodes is not None and nodes < 1:
        env.violations.append(f"--nodes {nodes} is not at least 1")
    if node_rank is not None and node_rank < 0:
        env.violations.append(f"--node-rank {node_rank} is below 0")
    where = host_and_port(endpoint) if endpoint is not None else None
    if endpoint is not None and where is None:
        env.violations.append(f"--rendezvous {endpoint[:80]!r} is not HOST:PORT")
    return Claim(
        "flags",
        "said on the command line",
        nodes=Fact(nodes, "--nodes") if nodes is not None else None,
        node_rank=Fact(node_rank, "--node-rank") if node_rank is not None else None,
        address=Fact(where[0], "--rendezvous") if where else None,
        port=Fact(where[1], "--rendezvous") if where else None,
    )


def _merge(speaker: Claim, flags: Claim, others: list[Claim], planned: int) -> Claim:
    """The speaker's claim with its gaps filled, first by the flags, then by the other starters."""
    answer = speaker
    if speaker.source == "none" and flags.nodes:
        answer = replace(speaker, source="flags", reason=f"{flags.names()}: {flags.reason}")
    if flags.address and not answer.rank:
        answer = replace(answer, address=None, port=None)  # an endpoint that a person chose wins
    for claim in (flags, *others):
        fills = {name: claim.facts().get(name) for name in ("nodes", "node_rank", "address", "port")}
        said: dict[str, Any] = fills | answer.facts()
        answer = replace(answer, **said)
    if answer.nodes is None and answer.source == "none":
        answer = replace(answer, nodes=Fact(planned, "devices.nodes"))
    if answer.nodes and answer.nodes.value == 1 and answer.node_rank is None:
        answer = replace(answer, node_rank=Fact(0, answer.nodes.said_by))
    return answer


def _gaps(answer: Claim, environment: Mapping[str, str]) -> list[str]:
    found = list(answer.contradictions())
    if answer.nodes is None:
        found.append(f"how many nodes there are is not said ({answer.reason}): say --nodes")
        return found
    if answer.nodes.value == 1 and not answer.rank:
        return found
    where = f"{answer.nodes.said_by}={answer.nodes.value}"
    if answer.node_rank is None:
        found.append(f"{where}, but which of them this is is not said: say --node-rank")
    if answer.address is None or answer.port is None:
        said = f"MASTER_ADDR={environment['MASTER_ADDR']!r} " if environment.get("MASTER_ADDR") else ""
        found.append(f"{where}, but where they meet is not said {said}: say --rendezvous HOST:PORT")
    return found


def _settle(answer: Claim) -> Rendezvous:
    assert answer.nodes and answer.node_rank, "gaps were refused above"
    said = {name: fact.value for name, fact in answer.facts().items()}
    # One node needs nobody from outside: its ranks meet where only this machine can reach them.
    inside = {"address": LOOPBACK, "port": None}
    where = said | inside if answer.nodes.value == 1 and not answer.rank else inside | said
    return Rendezvous(source=answer.source, reason=answer.reason, **where)
