"""What a starter says in the environment, one reader per starter: facts, each with the variable that said it.

Host names, ports and endpoints are read here; what a shell or a parser could take for something else is
refused. A reader returns its claim, or None when that starter did not start us.
"""

import ipaddress
import re
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")

# torchrun's own default, which is what PET_MASTER_PORT means when it is not set.
DEFAULT_PORT = 29500

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_GROUP = re.compile(r"\[([0-9]+)[^][]*\]", re.ASCII)
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x[0-9]{1,9}\))?", re.ASCII)
# Below the ephemeral ports, so that no outgoing connection of the machine holds the one we derive.
_SLURM_PORTS = range(20000, 32000)


def number(text: str) -> int | None:
    """The plain decimal number that `text` is, or None: no sign, blank or foreign digit."""
    return int(text) if _NUMBER.fullmatch(text) else None


def fixed_number(text: str) -> int | None:
    """The number from 1 that `text` is, or that both ends of the range `N:N` are, or None."""
    least, _, most = text.partition(":")
    return (number(least) or None) if most in ("", least) else None


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


def tasks_of(text: str) -> int | None:
    """The tasks of every node in what SLURM says of them, such as `2(x3),2`, or None where they differ."""
    tasks = {match and match[1] for match in map(_TASKS.fullmatch, text.split(","))}
    only = tasks.pop() if len(tasks) == 1 else None
    return int(only) if only else None


class Fact(NamedTuple, Generic[T]):
    """A value and the variable or flag that said it."""

    value: T
    said_by: str

    def __str__(self) -> str:
        return f"{self.said_by}={self.value}"


class Claim(NamedTuple):
    """Everything that one starter says about this process.

    `said` has what it says of nodes, node_rank, per_node, world_size, rank, local_rank, address and port.
    """

    source: str
    reason: str
    said: Mapping[str, Fact[Any]]

    def contradictions(self) -> list[str]:
        """What cannot be true together, naming both variables."""
        found = []
        for index, size in (("rank", "world_size"), ("local_rank", "per_node"), ("node_rank", "nodes")):
            i, n = self.said.get(index), self.said.get(size)
            if i and n and i.value >= n.value:
                found.append(f"{i} is not below {n}")
        nodes, per_node, world = map(self.said.get, ("nodes", "per_node", "world_size"))
        if nodes and per_node and world and nodes.value * per_node.value != world.value:
            found.append(f"{world} is not {nodes} times {per_node}")
        rank, local, node = map(self.said.get, ("rank", "local_rank", "node_rank"))
        if not found and rank and local and node and per_node:
            expected = node.value * per_node.value + local.value
            if rank.value != expected:
                found.append(
                    f"{rank}, but {node} and {local} make it {expected}: number the ranks node by node"
                )
        return found

    def against(self, other: "Claim") -> list[str]:
        """Where two starters disagree about the nodes, naming both variables."""
        both = ((self.said.get(name), other.said.get(name)) for name in ("nodes", "node_rank"))
        return [
            f"{ours} contradicts {theirs}: unset or correct one of them"
            for ours, theirs in both
            if ours and theirs and ours.value != theirs.value
        ]


def claim(source: str, reason: str, **facts: Fact[Any] | None) -> Claim:
    """The claim of these facts; None where nothing is said."""
    return Claim(source, reason, {name: fact for name, fact in facts.items() if fact is not None})


class Variables:
    """Reads an environment and collects what is wrong in it, so that all of it can be said at once.

    What a variable that is not set would have meant is `needed` where it must be there.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.violations: list[str] = []

    def has(self, *names: str) -> bool:
        """Whether all of `names` are set to something."""
        return all(self.environment.get(name) for name in names)

    def either(self, name: str, otherwise: str) -> str:
        """`name` where it is set, else the other one."""
        return name if self.has(name) else otherwise

    def text(self, name: str) -> str:
        """The value, empty when it is not set."""
        return self.environment.get(name, "")

    def count(self, name: str, least: int = 0, needed: str = "") -> Fact[int] | None:
        """A whole number of at least `least`."""

        def parse(text: str) -> int | None:
            value = number(text)
            return value if value is not None and value >= least else None

        return self.read(name, parse, f"a whole number from {least}", needed)

    def host(self, name: str, needed: str = "") -> Fact[str] | None:
        """A host name or an IP address."""
        return self.read(name, host, "a host name or an IP address", needed)

    def port(self, name: str, needed: str = "") -> Fact[int] | None:
        """A TCP port."""
        return self.read(name, port, "a port from 1 to 65535", needed)

    def refuse(self, name: str, expected: str) -> None:
        """Adds the violation that the value of `name` is not `expected`."""
        self.violations.append(f"{name}={self.text(name)[:80]!r} is not {expected}")

    def read(
        self, name: str, parse: Callable[[str], T | None], expected: str, needed: str = ""
    ) -> Fact[T] | None:
        """What `parse` makes of the value, which must be as `expected`."""
        if not self.has(name):
            self.violations += [f"{name} is not set: {needed}"] if needed else []
            return None
        value = parse(self.text(name))
        if value is None:
            self.refuse(name, expected)
            return None
        return Fact(value, name)


def torchrun(env: Variables) -> Claim | None:
    """The claim of torchrun, or of anybody who sets the variables that it sets: we are one rank."""
    if not env.has("RANK", "WORLD_SIZE", "LOCAL_RANK") or "," in env.text("LOCAL_RANK"):
        return None
    per_node = env.count("LOCAL_WORLD_SIZE", 1, "the ranks on this node")
    world, rank = env.count("WORLD_SIZE", 1), env.count("RANK")
    nodes, node_rank = env.count("GROUP_WORLD_SIZE", 1), env.count("GROUP_RANK")
    if per_node and world and nodes is None:
        nodes = _quotient(env, world, per_node)
    if per_node and rank and node_rank is None:
        node_rank = Fact(rank.value // per_node.value, "RANK / LOCAL_WORLD_SIZE")
    return claim(
        "torchrun",
        "RANK, LOCAL_RANK and WORLD_SIZE are set: this process is one rank",
        nodes=nodes,
        node_rank=node_rank,
        per_node=per_node,
        world_size=world,
        rank=rank,
        local_rank=env.count("LOCAL_RANK"),
        address=env.host("MASTER_ADDR", "the host of rank 0"),
        port=env.port("MASTER_PORT", "the port on the host of rank 0"),
    )


def ascend_operator(env: Variables) -> Claim | None:
    """The claim of the Ascend operator, whose RANK counts nodes and whose LOCAL_RANK is a list."""
    if not env.has("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE") or "," not in env.text("LOCAL_RANK"):
        return None
    per_node, world = env.count("LOCAL_WORLD_SIZE", 1), env.count("WORLD_SIZE", 1)
    listed = env.text("LOCAL_RANK").split(",")
    if per_node and len(listed) != per_node.value:
        env.violations.append(
            f"LOCAL_RANK lists {len(listed)} devices, but LOCAL_WORLD_SIZE={per_node.value}"
        )
    return claim(
        "ascend-operator",
        "LOCAL_RANK is a list of devices: this process stands for a node",
        nodes=_quotient(env, world, per_node) if world and per_node else None,
        node_rank=env.count("RANK"),
        per_node=per_node,
        address=env.host("MASTER_ADDR", "the service of the first pod"),
        port=env.port("MASTER_PORT", "the port of the first pod"),
    )


def pet(env: Variables) -> Claim | None:
    """The claim of PET_*, torchrun's defaults, which Kubeflow sets: we stand for a node."""
    if not env.has("PET_NNODES"):
        return None
    fixed = "one fixed number of nodes (elastic ranges cannot hold a parallel layout)"
    nodes = env.read("PET_NNODES", fixed_number, fixed)
    address, port = env.host("PET_MASTER_ADDR"), env.port("PET_MASTER_PORT")
    if where := env.read("PET_RDZV_ENDPOINT", host_and_port, "HOST:PORT"):
        address = address or Fact(where.value[0], where.said_by)
        port = port or Fact(where.value[1], where.said_by)
    per_node = env.text("PET_NPROC_PER_NODE") not in ("auto", "gpu", "cpu", "xpu")
    return claim(
        "pet",
        "PET_NNODES is set: this process stands for a node",
        nodes=nodes,
        node_rank=env.count("PET_NODE_RANK"),
        per_node=env.count("PET_NPROC_PER_NODE", 1) if per_node else None,
        address=address,
        port=port or (Fact(DEFAULT_PORT, "PET_MASTER_PORT's default") if address else None),
    )


def slurm(env: Variables) -> Claim | None:
    """The claim of SLURM: several tasks on a node are ranks, a single task stands for its node."""
    if not env.has("SLURM_JOB_ID"):
        return None
    step = env.has("SLURM_STEP_ID")
    nodes = env.count("SLURM_STEP_NUM_NODES", 1) if step else None
    nodes = nodes or env.count("SLURM_NNODES", 1)
    if not step:
        # A batch script or an salloc shell runs once, on one node, whatever the job holds.
        if nodes and nodes.value > 1:
            reason = (
                f"{nodes}, but this process is no step of the job;"
                " `srun --ntasks-per-node=1` starts it on every node"
            )
            return claim("slurm", reason)
        return claim("slurm", "a job on one node", nodes=nodes)
    listed = env.either("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    facts = {
        "nodes": nodes,
        "node_rank": env.count("SLURM_NODEID", needed="the index of this node in the step"),
        "address": env.host("MASTER_ADDR") or env.read(listed, first_of, "a node list such as gpu[01-04]"),
        "port": env.port("MASTER_PORT") or _job_port(env),
    }
    alike = "the same number of tasks on every node: ask for it with --ntasks-per-node"
    tasks = env.read(env.either("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), tasks_of, alike)
    if tasks is None or tasks.value == 1:
        return claim("slurm", "one task of the step on each node: this process stands for a node", **facts)
    return claim(
        "slurm",
        f"{tasks.value} tasks of the step on each node: this process is one rank",
        per_node=tasks,
        world_size=env.count("SLURM_STEP_NUM_TASKS", 1) or env.count("SLURM_NTASKS", 1),
        rank=env.count("SLURM_PROCID", needed="the rank"),
        local_rank=env.count("SLURM_LOCALID", needed="the rank on this node"),
        **facts,
    )


def indexed_job(env: Variables) -> Claim | None:
    """The claim of an indexed Kubernetes Job, which says only the index of its pod."""
    index = env.count("JOB_COMPLETION_INDEX")
    if index is None:
        return None
    reason = "JOB_COMPLETION_INDEX is set: this process stands for a node"
    address, port = env.host("MASTER_ADDR"), env.port("MASTER_PORT")
    return claim("kubernetes-job", reason, node_rank=index, address=address, port=port)


# The innermost first: torchrun runs inside the others.
STARTERS: tuple[Callable[[Variables], Claim | None], ...] = (
    torchrun,
    ascend_operator,
    pet,
    slurm,
    indexed_job,
)


# What the readers above read, and what beside it is of the same starters.
_SAID = re.compile(
    r"(SLURM|PET|GROUP)_.*|(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|JOB_COMPLETION_INDEX", re.ASCII
)


def unstarted(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what starters say in it, for a process whose place is another."""
    return {name: value for name, value in environment.items() if not _SAID.fullmatch(name)}


def _quotient(env: Variables, world: Fact[int], per_node: Fact[int]) -> Fact[int] | None:
    nodes, rest = divmod(world.value, per_node.value)
    if rest:
        env.violations.append(f"{world} is not a multiple of {per_node}")
        return None
    return Fact(nodes, f"{world.said_by} / {per_node.said_by}")


def _job_port(env: Variables) -> Fact[int] | None:
    job, step = env.count("SLURM_JOB_ID"), env.count("SLURM_STEP_ID")
    if job is None or step is None:
        return None
    # Two steps of one job, and two jobs of one array, must not meet on the port of a node they share.
    return Fact(
        _SLURM_PORTS[(job.value * 7 + step.value) % len(_SLURM_PORTS)], "SLURM_JOB_ID and SLURM_STEP_ID"
    )
