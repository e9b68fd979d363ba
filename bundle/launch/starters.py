"""One reader per starter: each returns its claim, or None when it did not start us."""

import re
from collections.abc import Callable

from bundle.launch.claims import DEFAULT_PORT, Claim, Fact, Variables, first_of, host_and_port, number

_TASKS = re.compile(r"([0-9]{1,9})(?:\(x[0-9]{1,9}\))?", re.ASCII)
# Below the ephemeral ports, so that no outgoing connection of the machine holds the one we derive.
_SLURM_PORTS = range(20000, 32000)


def torchrun(env: Variables) -> Claim | None:
    """The claim of torchrun, or of anybody who sets the variables that it sets: we are one rank."""
    if not env.has("RANK", "WORLD_SIZE", "LOCAL_RANK") or "," in env.text("LOCAL_RANK"):
        return None
    per_node = env.require(env.count("LOCAL_WORLD_SIZE", 1), "LOCAL_WORLD_SIZE", "the ranks on this node")
    world, rank = env.count("WORLD_SIZE", 1), env.count("RANK")
    nodes, node_rank = env.count("GROUP_WORLD_SIZE", 1), env.count("GROUP_RANK")
    if per_node and world and nodes is None:
        nodes = _quotient(env, world, per_node)
    if per_node and rank and node_rank is None:
        node_rank = Fact(rank.value // per_node.value, "RANK / LOCAL_WORLD_SIZE")
    return Claim(
        "torchrun",
        "RANK, LOCAL_RANK and WORLD_SIZE are set: this process is one rank",
        nodes,
        node_rank,
        per_node,
        world,
        rank,
        env.count("LOCAL_RANK"),
        env.require(env.host("MASTER_ADDR"), "MASTER_ADDR", "the host of rank 0"),
        env.require(env.port("MASTER_PORT"), "MASTER_PORT", "the port on the host of rank 0"),
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
    return Claim(
        "ascend-operator",
        "LOCAL_RANK is a list of devices: this process stands for a node",
        _quotient(env, world, per_node) if world and per_node else None,
        env.count("RANK"),
        per_node,
        address=env.require(env.host("MASTER_ADDR"), "MASTER_ADDR", "the service of the first pod"),
        port=env.require(env.port("MASTER_PORT"), "MASTER_PORT", "the port of the first pod"),
    )


def pet(env: Variables) -> Claim | None:
    """The claim of PET_*, torchrun's defaults, which Kubeflow sets: we stand for a node."""
    if not env.has("PET_NNODES"):
        return None
    least, _, most = env.text("PET_NNODES").partition(":")
    nodes = number(least) if most in ("", least) else None
    if not nodes:
        env.refuse("PET_NNODES", "one fixed number of nodes (elastic ranges cannot hold a parallel layout)")
    address, port = env.host("PET_MASTER_ADDR"), env.port("PET_MASTER_PORT")
    if env.has("PET_RDZV_ENDPOINT"):
        where = host_and_port(env.text("PET_RDZV_ENDPOINT"))
        if where is None:
            env.refuse("PET_RDZV_ENDPOINT", "HOST:PORT")
        else:
            address = address or Fact(where[0], "PET_RDZV_ENDPOINT")
            port = port or Fact(where[1], "PET_RDZV_ENDPOINT")
    per_node = env.text("PET_NPROC_PER_NODE") not in ("auto", "gpu", "cpu", "xpu")
    return Claim(
        "pet",
        "PET_NNODES is set: this process stands for a node",
        Fact(nodes, "PET_NNODES") if nodes else None,
        env.count("PET_NODE_RANK"),
        env.count("PET_NPROC_PER_NODE", 1) if per_node else None,
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
                f"{nodes.said_by}={nodes.value}, but this process is no step of the job;"
                " `srun --ntasks-per-node=1` starts it on every node"
            )
            return Claim("slurm", reason)
        return Claim("slurm", "a job on one node", nodes)
    address = env.host("MASTER_ADDR") or _first_host(env)
    port = env.port("MASTER_PORT") or _job_port(env)
    tasks = _tasks_per_node(env)
    node_rank = env.require(env.count("SLURM_NODEID"), "SLURM_NODEID", "the index of this node in the step")
    if tasks is None or tasks.value == 1:
        reason = "one task of the step on each node: this process stands for a node"
        return Claim("slurm", reason, nodes, node_rank, address=address, port=port)
    return Claim(
        "slurm",
        f"{tasks.value} tasks of the step on each node: this process is one rank",
        nodes,
        node_rank,
        tasks,
        env.count("SLURM_STEP_NUM_TASKS", 1) or env.count("SLURM_NTASKS", 1),
        env.require(env.count("SLURM_PROCID"), "SLURM_PROCID", "the rank"),
        env.require(env.count("SLURM_LOCALID"), "SLURM_LOCALID", "the rank on this node"),
        address,
        port,
    )


def indexed_job(env: Variables) -> Claim | None:
    """The claim of an indexed Kubernetes Job, which says only the index of its pod."""
    index = env.count("JOB_COMPLETION_INDEX")
    if index is None:
        return None
    reason = "JOB_COMPLETION_INDEX is set: this process stands for a node"
    address, port = env.host("MASTER_ADDR"), env.port("MASTER_PORT")
    return Claim("kubernetes-job", reason, node_rank=index, address=address, port=port)


# The innermost first: torchrun runs inside the others.
STARTERS: tuple[Callable[[Variables], Claim | None], ...] = (
    torchrun,
    ascend_operator,
    pet,
    slurm,
    indexed_job,
)


def _quotient(env: Variables, world: Fact[int], per_node: Fact[int]) -> Fact[int] | None:
    nodes, rest = divmod(world.value, per_node.value)
    if rest:
        env.violations.append(
            f"{world.said_by}={world.value} is not a multiple of {per_node.said_by}={per_node.value}"
        )
        return None
    return Fact(nodes, f"{world.said_by} / {per_node.said_by}")


def _first_host(env: Variables) -> Fact[str] | None:
    name = "SLURM_STEP_NODELIST" if env.has("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    if not env.has(name):
        return None
    first = first_of(env.text(name))
    if first is None:
        env.refuse(name, "a node list such as gpu[01-04]")
    return Fact(first, name) if first else None


def _job_port(env: Variables) -> Fact[int] | None:
    job, step = env.count("SLURM_JOB_ID"), env.count("SLURM_STEP_ID")
    if job is None or step is None:
        return None
    # Two steps of one job, and two jobs of one array, must not meet on the port of a node they share.
    return Fact(
        _SLURM_PORTS[(job.value * 7 + step.value) % len(_SLURM_PORTS)], "SLURM_JOB_ID and SLURM_STEP_ID"
    )


def _tasks_per_node(env: Variables) -> Fact[int] | None:
    name = "SLURM_STEP_TASKS_PER_NODE" if env.has("SLURM_STEP_TASKS_PER_NODE") else "SLURM_TASKS_PER_NODE"
    if not env.has(name):
        return None
    counts = [_TASKS.fullmatch(part) for part in env.text(name).split(",")]
    tasks = {match.group(1) for match in counts if match}
    if None in counts or len(tasks) != 1:
        env.refuse(name, "the same number of tasks on every node: ask for it with --ntasks-per-node")
        return None
    return Fact(int(tasks.pop()), name)
