"""The facts that a starter puts in the environment: one reader per starter; each fact has its variable.

Host names, ports and endpoints are read here. Texts that a shell or a parser could misread are refused. A
reader returns its claim, or None where that starter did not start us.
"""

import ipaddress
import re
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")

# torchrun's default, which counts where PET_MASTER_PORT is not set.
DEFAULT_PORT = 29500

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_VALID_HOST_NAME_PATTERN = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_NODELIST_RANGE_PATTERN = re.compile(r"\[([0-9]+)[^][]*\]", re.ASCII)
_TASK_COUNT_PATTERN = re.compile(r"([0-9]{1,9})(?:\(x[0-9]{1,9}\))?", re.ASCII)
# Below the ephemeral ports, so no outgoing connection of the machine holds the derived port.
_SLURM_PORTS = range(20000, 32000)


def parse_number(text: str) -> int | None:
    """Return the plain decimal number in `text`, or None: no sign, blank or foreign digit."""
    return int(text) if _NUMBER.fullmatch(text) else None


def parse_fixed_nnodes(text: str) -> int | None:
    """Return the number from 1 in `text`, or in both ends of the range `N:N`, or None."""
    least, _, most = text.partition(":")
    return (parse_number(least) or None) if most in ("", least) else None


def parse_port(text: str) -> int | None:
    """Return a TCP port that a client can connect to, or None."""
    value = parse_number(text)
    return value if value is not None and 0 < value < 2**16 else None


def normalize_host(text: str) -> str | None:
    """Return a host name, an IPv4 or an IPv6 address (brackets removed), or None."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        return str(ipaddress.ip_address(bare)) if "%" not in bare else None
    except ValueError:
        return text if len(text) <= 253 and _VALID_HOST_NAME_PATTERN.fullmatch(text) else None


def parse_host_and_port(text: str) -> tuple[str, int] | None:
    """Return (host, port) of `HOST:PORT` or `[IPv6]:PORT`, or None."""
    name, colon, digits = text.rpartition(":")
    host_value, port_value = normalize_host(name), parse_port(digits)
    if not colon or host_value is None or port_value is None or (":" in host_value) != name.startswith("["):
        return None
    return host_value, port_value


def parse_first_host(nodelist: str) -> str | None:
    """Return the first host of a SLURM node list such as `gpu[001-003,10],login1`, or None.

    Only the first host of a list is ever needed, and `scontrol show hostnames` fails without a slurm.conf.
    """
    if len(nodelist) > 1_000_000:
        return None
    outside, depth = "", 0
    for letter in nodelist:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            break
        outside += letter
    return normalize_host(_NODELIST_RANGE_PATTERN.sub(r"\1", outside))


def parse_tasks_per_node(text: str) -> int | None:
    """Return the tasks per node in SLURM's form such as `2(x3),2`; None where nodes differ."""
    tasks = {match and match[1] for match in map(_TASK_COUNT_PATTERN.fullmatch, text.split(","))}
    only = tasks.pop() if len(tasks) == 1 else None
    return int(only) if only else None


class SourcedValue(NamedTuple, Generic[T]):
    """A value and the variable or flag that it comes from."""

    value: T
    source: str

    def __str__(self) -> str:
        return f"{self.source}={self.value}"


class Claim(NamedTuple):
    """Everything that one starter says about this process.

    `settings` has its values of nodes, node_rank, per_node, world_size, rank, local_rank, address and port.
    """

    source: str
    reason: str
    settings: Mapping[str, SourcedValue[Any]]

    def find_inconsistent_settings(self) -> list[str]:
        """Return messages about values that cannot be true together, with both variables."""
        problems = []
        for index, size in (("rank", "world_size"), ("local_rank", "per_node"), ("node_rank", "nodes")):
            i, n = self.settings.get(index), self.settings.get(size)
            if i and n and i.value >= n.value:
                problems.append(f"{i} is not below {n}")
        nodes, per_node, world = map(self.settings.get, ("nodes", "per_node", "world_size"))
        if nodes and per_node and world and nodes.value * per_node.value != world.value:
            problems.append(f"{world} is not {nodes} times {per_node}")
        rank, local, node = map(self.settings.get, ("rank", "local_rank", "node_rank"))
        if not problems and rank and local and node and per_node:
            expected = node.value * per_node.value + local.value
            if rank.value != expected:
                problems.append(
                    f"{rank}, but {node}, {per_node} and {local} give rank {expected} ({node.value} x"
                    f" {per_node.value} + {local.value}). Number the ranks node by node"
                )
        return problems

    def find_conflicts(self, other: "Claim") -> list[str]:
        """Return messages about the nodes where two starters disagree, with both variables."""
        pairs = ((self.settings.get(name), other.settings.get(name)) for name in ("nodes", "node_rank"))
        return [
            f"{ours} contradicts {theirs}. Unset or correct one of them"
            for ours, theirs in pairs
            if ours and theirs and ours.value != theirs.value
        ]


def build_claim(source: str, reason: str, **facts: SourcedValue[Any] | None) -> Claim:
    """Return the claim of the facts that are not None."""
    return Claim(source, reason, {name: fact for name, fact in facts.items() if fact is not None})


class VariableReader:
    """Reads an environment and collects its problems, so that all can be reported at once.

    `missing_hint` describes a required variable; where it is not set, that is a problem too.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.violations: list[str] = []

    def has(self, *names: str) -> bool:
        """Return whether all of `names` are set and not empty."""
        return all(self.environment.get(name) for name in names)

    def choose_name(self, name: str, fallback: str) -> str:
        """Return `name` where it is set, else `fallback`."""
        return name if self.has(name) else fallback

    def get_text_or_empty(self, name: str) -> str:
        """Return the value, empty where it is not set."""
        return self.environment.get(name, "")

    def read_count(self, name: str, least: int = 0, missing_hint: str = "") -> SourcedValue[int] | None:
        """Return a whole number of at least `least`."""

        def parse(text: str) -> int | None:
            value = parse_number(text)
            return value if value is not None and value >= least else None

        return self.read_or_add_violation(name, parse, f"a whole number of at least {least}", missing_hint)

    def read_host(self, name: str, missing_hint: str = "") -> SourcedValue[str] | None:
        """Return a host name or an IP address."""
        return self.read_or_add_violation(name, normalize_host, "a host name or an IP address", missing_hint)

    def read_port(self, name: str, missing_hint: str = "") -> SourcedValue[int] | None:
        """Return a TCP port."""
        return self.read_or_add_violation(name, parse_port, "a port from 1 to 65535", missing_hint)

    def add_violation(self, name: str, expected: str) -> None:
        """Add the violation that the value of `name` is not `expected`."""
        self.violations.append(f"{name}={self.get_text_or_empty(name)[:80]!r} is not {expected}")

    def read_or_add_violation(
        self, name: str, parse: Callable[[str], T | None], expected: str, missing_hint: str = ""
    ) -> SourcedValue[T] | None:
        """Return the value as `parse` reads it; a value that is not `expected` is a violation."""
        if not self.has(name):
            self.violations += [f"{name} ({missing_hint}) is not set"] if missing_hint else []
            return None
        value = parse(self.get_text_or_empty(name))
        if value is None:
            self.add_violation(name, expected)
            return None
        return SourcedValue(value, name)


def read_torchrun(env: VariableReader) -> Claim | None:
    """Return the claim of torchrun, or of a starter that sets the same variables: we are one rank."""
    if not env.has("RANK", "WORLD_SIZE", "LOCAL_RANK") or "," in env.get_text_or_empty("LOCAL_RANK"):
        return None
    per_node = env.read_count("LOCAL_WORLD_SIZE", 1, "the ranks on this node")
    world, rank = env.read_count("WORLD_SIZE", 1), env.read_count("RANK")
    nodes, node_rank = env.read_count("GROUP_WORLD_SIZE", 1), env.read_count("GROUP_RANK")
    if per_node and world and nodes is None:
        nodes = _derive_node_count(env, world, per_node)
    if per_node and rank and node_rank is None:
        node_rank = SourcedValue(rank.value // per_node.value, "RANK / LOCAL_WORLD_SIZE")
    return build_claim(
        "torchrun",
        "RANK, LOCAL_RANK and WORLD_SIZE are set: this process is one rank",
        nodes=nodes,
        node_rank=node_rank,
        per_node=per_node,
        world_size=world,
        rank=rank,
        local_rank=env.read_count("LOCAL_RANK"),
        address=env.read_host("MASTER_ADDR", "the host of rank 0"),
        port=env.read_port("MASTER_PORT", "the port on the host of rank 0"),
    )


def read_ascend_operator(env: VariableReader) -> Claim | None:
    """Return the claim of the Ascend operator: RANK counts nodes and LOCAL_RANK is a list."""
    if not env.has("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE") or "," not in env.get_text_or_empty(
        "LOCAL_RANK"
    ):
        return None
    per_node, world = env.read_count("LOCAL_WORLD_SIZE", 1), env.read_count("WORLD_SIZE", 1)
    listed = env.get_text_or_empty("LOCAL_RANK").split(",")
    if per_node and len(listed) != per_node.value:
        env.violations.append(
            f"LOCAL_RANK lists {len(listed)} devices, but LOCAL_WORLD_SIZE={per_node.value}"
        )
    return build_claim(
        "ascend-operator",
        "LOCAL_RANK is a list of devices: this process stands for a node",
        nodes=_derive_node_count(env, world, per_node) if world and per_node else None,
        node_rank=env.read_count("RANK"),
        per_node=per_node,
        address=env.read_host("MASTER_ADDR", "the service of the first pod"),
        port=env.read_port("MASTER_PORT", "the port of the first pod"),
    )


def read_pet(env: VariableReader) -> Claim | None:
    """Return the claim of PET_*, torchrun's defaults, which Kubeflow sets: we stand for a node."""
    if not env.has("PET_NNODES"):
        return None
    fixed = "one fixed number of nodes (a parallel layout cannot use an elastic range)"
    nodes = env.read_or_add_violation("PET_NNODES", parse_fixed_nnodes, fixed)
    address, port = env.read_host("PET_MASTER_ADDR"), env.read_port("PET_MASTER_PORT")
    if endpoint := env.read_or_add_violation("PET_RDZV_ENDPOINT", parse_host_and_port, "HOST:PORT"):
        address = address or SourcedValue(endpoint.value[0], endpoint.source)
        port = port or SourcedValue(endpoint.value[1], endpoint.source)
    per_node = env.get_text_or_empty("PET_NPROC_PER_NODE") not in ("auto", "gpu", "cpu", "xpu")
    return build_claim(
        "pet",
        "PET_NNODES is set: this process stands for a node",
        nodes=nodes,
        node_rank=env.read_count("PET_NODE_RANK"),
        per_node=env.read_count("PET_NPROC_PER_NODE", 1) if per_node else None,
        address=address,
        port=port or (SourcedValue(DEFAULT_PORT, "PET_MASTER_PORT's default") if address else None),
    )


def read_slurm(env: VariableReader) -> Claim | None:
    """Return the claim of SLURM: several tasks on a node are ranks, a single task stands for its node."""
    if not env.has("SLURM_JOB_ID"):
        return None
    step = env.has("SLURM_STEP_ID")
    nodes = env.read_count("SLURM_STEP_NUM_NODES", 1) if step else None
    nodes = nodes or env.read_count("SLURM_NNODES", 1)
    if not step:
        # A batch script or an salloc shell runs once, on one node, whatever the job holds.
        if nodes and nodes.value > 1:
            reason = (
                f"{nodes}, but this process is not a step of the job;"
                " `srun --ntasks-per-node=1` starts it on every node"
            )
            return build_claim("slurm", reason)
        return build_claim("slurm", "a job on one node", nodes=nodes)
    listed = env.choose_name("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    facts = {
        "nodes": nodes,
        "node_rank": env.read_count("SLURM_NODEID", missing_hint="the index of this node in the step"),
        "address": env.read_host("MASTER_ADDR")
        or env.read_or_add_violation(listed, parse_first_host, "a node list such as gpu[01-04]"),
        "port": env.read_port("MASTER_PORT") or _derive_job_port(env),
    }
    expected = "the same number of tasks on every node. Set one number with --ntasks-per-node"
    tasks = env.read_or_add_violation(
        env.choose_name("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), parse_tasks_per_node, expected
    )
    if tasks is None or tasks.value == 1:
        return build_claim(
            "slurm", "one task of the step on each node: this process stands for a node", **facts
        )
    return build_claim(
        "slurm",
        f"{tasks.value} tasks of the step on each node: this process is one rank",
        per_node=tasks,
        world_size=env.read_count("SLURM_STEP_NUM_TASKS", 1) or env.read_count("SLURM_NTASKS", 1),
        rank=env.read_count("SLURM_PROCID", missing_hint="the rank"),
        local_rank=env.read_count("SLURM_LOCALID", missing_hint="the rank on this node"),
        **facts,
    )


def read_indexed_job_rank(env: VariableReader) -> Claim | None:
    """Return the claim of an indexed Kubernetes Job, which only has the index of its pod."""
    index = env.read_count("JOB_COMPLETION_INDEX")
    if index is None:
        return None
    reason = "JOB_COMPLETION_INDEX is set: this process stands for a node"
    address, port = env.read_host("MASTER_ADDR"), env.read_port("MASTER_PORT")
    return build_claim("kubernetes-job", reason, node_rank=index, address=address, port=port)


# The innermost first: torchrun runs inside the others.
STARTERS: tuple[Callable[[VariableReader], Claim | None], ...] = (
    read_torchrun,
    read_ascend_operator,
    read_pet,
    read_slurm,
    read_indexed_job_rank,
)


# The variables that the readers above read, and further ones of the same starters.
_STARTER_VARIABLE_PATTERN = re.compile(
    r"(SLURM|PET|GROUP)_.*|(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|JOB_COMPLETION_INDEX", re.ASCII
)


def remove_starter_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the starters' variables, for a process in another place."""
    return {
        name: value for name, value in environment.items() if not _STARTER_VARIABLE_PATTERN.fullmatch(name)
    }


def _derive_node_count(
    env: VariableReader, world: SourcedValue[int], per_node: SourcedValue[int]
) -> SourcedValue[int] | None:
    nodes, rest = divmod(world.value, per_node.value)
    if rest:
        env.violations.append(f"{world} is not a multiple of {per_node}")
        return None
    return SourcedValue(nodes, f"{world.source} / {per_node.source}")


def _derive_job_port(env: VariableReader) -> SourcedValue[int] | None:
    job, step = env.read_count("SLURM_JOB_ID"), env.read_count("SLURM_STEP_ID")
    if job is None or step is None:
        return None
    # Two steps of one job, and two jobs of one array, need different ports on a node that they share.
    return SourcedValue(
        _SLURM_PORTS[(job.value * 7 + step.value) % len(_SLURM_PORTS)], "SLURM_JOB_ID and SLURM_STEP_ID"
    )
