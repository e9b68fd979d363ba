"""A RayJob of KubeRay: the job's own Ray cluster, with a worker for each node and the driver on the head.

The driver is `launch ray`. A pod beside the cluster submits it and writes the driver's output. Fields:
KubeRay's CRDs; their effect: its ray-operator/controllers/ray/{rayjob_controller,common/job,common/pod}.go.
"""

import shlex
from pathlib import Path
from typing import Any

from bundle.launch import LOCK_FILE
from bundle.launch.job import FILE_NAME
from bundle.targets import ray
from bundle.targets.images import HOME
from bundle.targets.kubernetes.pod import INSTANCE_LABEL, JOB_MOUNT_DIRECTORY, Workload

API_VERSION = "ray.io/v1"
WORKER_GROUP = "node"
MAX_NAME_CHARACTERS = 47  # the longest name; KubeRay appends suffixes for the cluster's Services
RAY_VERSION = "2.60.0"  # the minimum of the extra `ray`; KubeRay checks it, as older releases have no tokens
# For a head with only Ray's services, dashboard and the driver, which took 1.6 GB when measured.
_HEAD_RESOURCES = {"cpu": "4", "memory": "8Gi"}
_SUBMITTER_RESOURCES = {"cpu": "1", "memory": "1Gi"}


def build_rayjob(workload: Workload) -> list[dict[str, Any]]:
    """Return a RayJob; KubeRay makes its cluster again at most `restarts` times.

    It does so when the driver or the head is lost.
    """
    bundle, *_ = ray.build_placement_bundles(workload.job)
    start_options = {
        name: shlex.quote(value) for name, value in ray.build_start_command_options(bundle).items()
    }  # a shell reads it
    worker, head, submitter = (
        workload.build_template([]),
        workload.build_template([], "head", has_ranks=False),
        workload.build_template([], "submitter", has_ranks=False),
    )
    for template in (worker, head):
        _adapt_to_ray(workload, template)
    (container,) = head["spec"]["containers"]
    container["resources"] = {"limits": _HEAD_RESOURCES, "requests": dict(_HEAD_RESOURCES)}
    # The seconds that a stopped driver gets to end; Ray's default is 3 seconds.
    seconds = head["spec"]["terminationGracePeriodSeconds"]
    container["env"].append({"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": str(seconds)})
    (container,) = submitter["spec"]["containers"]
    container["resources"] = {"limits": _SUBMITTER_RESOURCES, "requests": dict(_SUBMITTER_RESOURCES)}
    del container["args"]
    workload.add_kueue_topology_annotation(worker)
    manifest = workload.build_annotated_manifest_skeleton(
        API_VERSION, "RayJob", workload.kueue_queue_name_label
    )
    manifest["spec"] = {
        # Not the shell's `cd`: two shells read this, the submitter's and the driver's.
        "entrypoint": f"env --chdir={HOME} mcore-bundle launch ray --job={JOB_MOUNT_DIRECTORY}/{FILE_NAME}"
        f" --restarts={workload.options.restarts}{' --preflight' if workload.options.preflight else ''}",
        "submissionMode": "K8sJobMode",
        "backoffLimit": workload.options.restarts,
        "shutdownAfterJobFinishes": True,
        "submitterPodTemplate": submitter,
        "rayClusterSpec": {
            "rayVersion": RAY_VERSION,
            "authOptions": {"mode": "token"},
            "headGroupSpec": {
                "serviceType": "ClusterIP",
                "enableIngress": False,
                "rayStartParams": ray.build_start_command_options({"CPU": 0.0, "GPU": 0.0}),
                "template": head,
            },
            "workerGroupSpecs": [
                {
                    "groupName": WORKER_GROUP,
                    "replicas": workload.job.nodes,
                    "minReplicas": workload.job.nodes,
                    "maxReplicas": workload.job.nodes,
                    "rayStartParams": start_options,
                    "template": worker,
                }
            ],
        },
    }
    return [manifest]


def _adapt_to_ray(workload: Workload, template: dict[str, Any]) -> None:
    """Turn a pod into one of the Ray cluster; it stays until a job that was told to end has saved.

    Only the submitter keeps the label of the job's pods, as it writes the output of the others.
    """
    template["metadata"]["labels"]["app.kubernetes.io/part-of"] = template["metadata"]["labels"].pop(
        INSTANCE_LABEL
    )
    (container,) = template["spec"]["containers"]
    del container["args"]  # KubeRay writes `ray start`
    lock = Path(HOME) / workload.job.directory / LOCK_FILE
    container["lifecycle"] = {"preStop": {"exec": {"command": ["flock", str(lock), "true"]}}}
