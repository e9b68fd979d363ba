"""A Job of Volcano: all pods or none, and the scheduler that MindCluster's plugin for Ascend is part of.

Fields: volcano-sh/volcano, config/crd/volcano/bases; policies, names and variables: its pkg/controllers/job.
"""

from collections.abc import Iterator
from typing import Any

from bundle.errors import shown
from bundle.targets.kubernetes.pod import NEVER, Workload, pairs

API = "batch.volcano.sh/v1alpha1"
SCHEDULER = "volcano"
TASK = "node"
_INDEX = "VC_TASK_INDEX"  # of the plugin env
# MindCluster's label of nodes, and what its plugin for Volcano looks for on a job: YAML parameters of
# hiascend.com/document/detail/en/mindcluster/730/clustersched, affinity scheduling of logical SuperPoDs.
_NODES, BLOCK = "accelerator-type", "sp-block"


def job(of: Workload) -> list[dict[str, Any]]:
    """A Job, which starts all pods again when one is lost."""
    options = of.options
    template = of.template(of.words_at(f"{of.name}-{TASK}-0.{of.name}", _INDEX))
    if of.job.backend == "ascend":
        _name_devices(template["spec"]["containers"][0])
    workload = of.workload(API, "Job", annotations=super_pod(of))
    workload["spec"] = {
        "schedulerName": SCHEDULER,
        "minAvailable": of.job.nodes,
        "maxRetry": options.restarts,
        "ttlSecondsAfterFinished": options.keep_seconds,
        **({"queue": options.queue} if options.queue else {}),
        **({"priorityClassName": options.priority} if options.priority else {}),
        **(
            {"networkTopology": {"mode": "hard", "highestTierAllowed": int(options.topology)}}
            if options.topology
            else {}
        ),
        "plugins": {"env": [], "svc": ["--publish-not-ready-addresses=true"]},
        # The first that fits is taken, and a code comes with the event that its pod has failed.
        "policies": [
            *({"exitCode": code, "action": "TerminateJob"} for code in NEVER),
            {"event": "PodFailed", "action": "RestartJob"},
            {"event": "PodEvicted", "action": "RestartJob"},
        ],
        "tasks": [{"name": TASK, "replicas": of.job.nodes, "template": template}],
    }
    return [workload]


def super_pod(of: Workload) -> dict[str, str]:
    """How many NPUs lie in one super pod, for nodes that are selected as those of one: all of the job."""
    selected = pairs(of.options.selectors).get(_NODES, "")
    all_of_it = of.job.nodes * of.job.per_node
    return {BLOCK: str(all_of_it)} if selected.endswith("-super-pod") else {}


def misfits(of: Workload) -> Iterator[str]:
    """What MindCluster's plugin does not take: blocks that no nodes make, or that do not make the job."""
    block = pairs(of.options.annotations).get(BLOCK)
    most, least = of.job.nodes * of.job.per_node, of.job.per_node
    blocks = [str(size) for size in range(least, most + 1, least) if most % size == 0]
    if block is not None and block not in blocks:
        yield f"--annotation {BLOCK}={shown(block)}: for this job one of {', '.join(blocks[:8])}"


def _name_devices(container: dict[str, Any]) -> None:
    """Ascend Docker Runtime mounts what this variable names, which the scheduler writes beside the pod."""
    device = next(iter(container["resources"]["limits"]))
    field = {"fieldRef": {"fieldPath": f"metadata.annotations['{device}']"}}
    container["env"].append({"name": "ASCEND_VISIBLE_DEVICES", "valueFrom": field})
