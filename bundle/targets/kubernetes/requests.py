"""The processors and the memory that a pod requests where `--resource` does not say: estimated from the plan.

They are not limits. A pod that needs more than the estimate gets it where its node has it.
"""

import math
from typing import Any

from bundle.launch.job import Job

# A choice, not measured: two threads of a rank are busy, and libraries with their buffers take this memory.
_PROCESSORS_PER_RANK = 2
_OVERHEAD_BYTES_PER_RANK = 4 << 30


def estimate_requests(job: Job) -> dict[str, str]:
    """Return the quantities of `cpu` and `memory` for one node."""
    processors = _PROCESSORS_PER_RANK + _count_reward_processes_per_rank(job)
    gibibytes = math.ceil(
        job.per_node * (_OVERHEAD_BYTES_PER_RANK + _estimate_host_bytes_per_rank(job)) / 2**30
    )
    return {"cpu": str(job.per_node * processors), "memory": f"{gibibytes}Gi"}


def _count_reward_processes_per_rank(job: Job) -> int:
    """Return the number of processes beside a rank that judge its answers."""
    rl = job.recipe.rl
    return 0 if rl is None else sum(reward.processes for reward in rl.rewards if reward.kind != "exact")


def _estimate_host_bytes_per_rank(job: Job) -> int:
    """Return the bytes of a rank in host memory: offloaded state, its share of a checkpoint, copies.

    With task rl, a rank keeps a copy of the reference model's weights. Ranks of backend cpu are on the host.
    """
    stages: list[dict[str, Any]] = [stage["bytes"] for stage in job.plan.get("stages", ())]
    keys = ["total"] if job.backend == "cpu" else ["host"]
    keys += ["parameters"] if job.recipe.rl is not None else []
    state = max((sum(stage[key] for key in keys) for stage in stages), default=0)
    checkpoint = job.plan.get("checkpoint", {}).get("bytes", 0) // (job.nodes * job.per_node)
    return int(state + checkpoint)
