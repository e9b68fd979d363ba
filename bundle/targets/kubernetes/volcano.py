"""A Job of Volcano: all pods or none, and the scheduler that MindCluster's plugin for Ascend is part of.

Fields: volcano-sh/volcano, config/crd/volcano/bases; policies, names and variables: its pkg/controllers/job.
"""

from typing import Any

from bundle.targets.kubernetes.pod import NEVER, Workload

API = "batch.volcano.sh/v1alpha1"
SCHEDULER = "volcano"
TASK = "node"
_INDEX = "VC_TASK_INDEX"  # of the plugin env


def job(of: Workload) -> list[dict[str, Any]]:
    """A Job, which starts all pods again when one is lost."""
    options = of.options
    template = of.template(of.words_at(f"{of.name}-{TASK}-0.{of.name}", _INDEX))
    if of.job.backend == "ascend":
        _name_devices(template["spec"]["containers"][0])
    workload = of.object(API, "Job")
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


def _name_devices(container: dict[str, Any]) -> None:
    """Ascend Docker Runtime mounts what this variable names, which the scheduler writes beside the pod."""
    device = next(iter(container["resources"]["limits"]))
    field = {"fieldRef": {"fieldPath": f"metadata.annotations['{device}']"}}
    container["env"] = [{"name": "ASCEND_VISIBLE_DEVICES", "valueFrom": field}]
