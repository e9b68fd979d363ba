"""A Job of Volcano, which starts all pods or none; MindCluster's plugin for Ascend extends this scheduler.

Fields: volcano-sh/volcano, config/crd/volcano/bases; policies, names and variables: its pkg/controllers/job.
"""

from collections.abc import Iterator
from typing import Any

from bundle.errors import format_value
from bundle.targets.kubernetes.pod import PERMANENT_EXIT_CODES, Workload, split_pairs

API_VERSION = "batch.volcano.sh/v1alpha1"
SCHEDULER_NAME = "volcano"
TASK_NAME = "node"
_INDEX_VARIABLE = "VC_TASK_INDEX"  # of the plugin env
# MindCluster's node label, and the job annotation that its plugin reads (affinity of logical SuperPoDs):
# hiascend.com/document/detail/en/mindcluster/730/clustersched, YAML parameters.
_NODE_LABEL, BLOCK_ANNOTATION = "accelerator-type", "sp-block"


def build_volcano_job(workload: Workload) -> list[dict[str, Any]]:
    """Return a Volcano Job, which starts all pods again when one is lost."""
    options = workload.options
    template = workload.build_template(
        workload.build_container_arguments(f"{workload.name}-{TASK_NAME}-0.{workload.name}", _INDEX_VARIABLE)
    )
    if workload.job.backend == "ascend":
        _add_ascend_visible_devices(template["spec"]["containers"][0])
    manifest = workload.build_annotated_manifest_skeleton(
        API_VERSION, "Job", annotations=build_super_pod_annotation(workload)
    )
    manifest["spec"] = {
        "schedulerName": SCHEDULER_NAME,
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
        # The first matching policy counts; an exit code arrives together with the event PodFailed.
        "policies": [
            *({"exitCode": code, "action": "TerminateJob"} for code in PERMANENT_EXIT_CODES),
            {"event": "PodFailed", "action": "RestartJob"},
            {"event": "PodEvicted", "action": "RestartJob"},
        ],
        "tasks": [{"name": TASK_NAME, "replicas": workload.job.nodes, "template": template}],
    }
    return [manifest]


def build_super_pod_annotation(workload: Workload) -> dict[str, str]:
    """Return the annotation with the number of NPUs in one super pod, which holds the whole job.

    It is empty unless the selected nodes are those of a super pod.
    """
    selected = split_pairs(workload.options.selectors).get(_NODE_LABEL, "")
    job_devices = workload.job.nodes * workload.job.per_node
    return {BLOCK_ANNOTATION: str(job_devices)} if selected.endswith("-super-pod") else {}


def find_invalid_super_pod_block(workload: Workload) -> Iterator[str]:
    """Yield a message for a block size that MindCluster's plugin refuses.

    A block must consist of whole nodes, and the job of whole blocks.
    """
    block = split_pairs(workload.options.annotations).get(BLOCK_ANNOTATION)
    most, least = workload.job.nodes * workload.job.per_node, workload.job.per_node
    blocks = [str(size) for size in range(least, most + 1, least) if most % size == 0]
    if block is not None and block not in blocks:
        yield (
            f"--annotation {BLOCK_ANNOTATION}={format_value(block)}: must be one of"
            f" {', '.join(blocks[:8])} for this job"
        )


def _add_ascend_visible_devices(container: dict[str, Any]) -> None:
    """Add the variable that names the devices which Ascend Docker Runtime mounts.

    Its value comes from an annotation that the scheduler writes on the pod.
    """
    device = next(iter(container["resources"]["limits"]))
    field = {"fieldRef": {"fieldPath": f"metadata.annotations['{device}']"}}
    container["env"].append({"name": "ASCEND_VISIBLE_DEVICES", "valueFrom": field})
