"""A Job of Volcano: all pods or none, and the scheduler that MindCluster's plugin for Ascend is part of.

Fields: volcano-sh/volcano, config/crd/volcano/bases; policies, names and variables: its pkg/controllers/job.
"""

from collections.abc import Iterator
from typing import Any

from bundle.errors import format_value
from bundle.targets.kubernetes.pod import PERMANENT_EXIT_CODES, Workload, parse_pairs

API = "batch.volcano.sh/v1alpha1"
SCHEDULER = "volcano"
TASK_NAME = "node"
_INDEX_VARIABLE = "VC_TASK_INDEX"  # of the plugin env
# MindCluster's label of nodes, and what its plugin for Volcano looks for on a job: YAML parameters of
# hiascend.com/document/detail/en/mindcluster/730/clustersched, affinity scheduling of logical SuperPoDs.
_NODE_LABEL, BLOCK_ANNOTATION = "accelerator-type", "sp-block"


def build_volcano_job(workload: Workload) -> list[dict[str, Any]]:
    """A Job, which starts all pods again when one is lost."""
    options = workload.options
    template = workload.build_template(
        workload.build_arguments(f"{workload.name}-{TASK_NAME}-0.{workload.name}", _INDEX_VARIABLE)
    )
    if workload.job.backend == "ascend":
        _add_visible_devices_variable(template["spec"]["containers"][0])
    manifest = workload.build_manifest(API, "Job", annotations=build_super_pod_annotation(workload))
    manifest["spec"] = {
        "schedulerName": SCHEDULER,
        "minAvailable": workload.job.nodes,
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
            *({"exitCode": code, "action": "TerminateJob"} for code in PERMANENT_EXIT_CODES),
            {"event": "PodFailed", "action": "RestartJob"},
            {"event": "PodEvicted", "action": "RestartJob"},
        ],
        "tasks": [{"name": TASK_NAME, "replicas": workload.job.nodes, "template": template}],
    }
    return [manifest]


def build_super_pod_annotation(workload: Workload) -> dict[str, str]:
    """How many NPUs lie in one super pod, for nodes that are selected as those of one: all of the job."""
    selected = parse_pairs(workload.options.selectors).get(_NODE_LABEL, "")
    job_devices = workload.job.nodes * workload.job.per_node
    return {BLOCK_ANNOTATION: str(job_devices)} if selected.endswith("-super-pod") else {}


def find_misfits(workload: Workload) -> Iterator[str]:
    """What MindCluster's plugin does not take: blocks that no nodes make, or that do not make the job."""
    block = parse_pairs(workload.options.annotations).get(BLOCK_ANNOTATION)
    most, least = workload.job.nodes * workload.job.per_node, workload.job.per_node
    blocks = [str(size) for size in range(least, most + 1, least) if most % size == 0]
    if block is not None and block not in blocks:
        yield (
            f"--annotation {BLOCK_ANNOTATION}={format_value(block)}: for this job one of"
            f" {', '.join(blocks[:8])}"
        )


def _add_visible_devices_variable(container: dict[str, Any]) -> None:
    """Ascend Docker Runtime mounts what this variable names, which the scheduler writes beside the pod."""
    device = next(iter(container["resources"]["limits"]))
    field = {"fieldRef": {"fieldPath": f"metadata.annotations['{device}']"}}
    container["env"].append({"name": "ASCEND_VISIBLE_DEVICES", "valueFrom": field})
