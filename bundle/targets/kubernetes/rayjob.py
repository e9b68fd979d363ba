"""A RayJob of KubeRay: a Ray cluster of its own, a worker for each node, and the driver on its head.

The driver is `launch ray`; a pod beside the cluster submits it, and writes what it writes. Fields: KubeRay's
CRDs; what becomes of them: its ray-operator/controllers/ray/{rayjob_controller,common/job,common/pod}.go.
"""

import shlex
from pathlib import Path
from typing import Any

from bundle.launch import LOCK
from bundle.launch.job import NAME
from bundle.targets import ray
from bundle.targets.kubernetes.pod import HOME, INSTANCE, JOB, Workload

API = "ray.io/v1"
GROUP = "node"
LONGEST = 47  # characters of a name, behind which KubeRay puts those of the cluster's Services
RAY = "2.60.0"  # the least that the extra `ray` takes; KubeRay asks, since older ones know no tokens
# Of a head that runs nothing but Ray's own services and the driver: 1.6 GB with its dashboard, measured.
_HEAD = {"cpu": "4", "memory": "8Gi"}
_SUBMITTER = {"cpu": "1", "memory": "1Gi"}


def rayjob(of: Workload) -> list[dict[str, Any]]:
    """A RayJob, whose cluster is made again when its driver or its head is lost, at most `restarts` times."""
    bundle, *_ = ray.bundles(of.job)
    start = {name: shlex.quote(value) for name, value in ray.started_with(bundle).items()}  # a shell reads it
    worker, head, submitter = of.template([]), of.template([], "head"), of.template([], "submitter")
    for template in (worker, head):
        _of_ray(of, template)
    (container,) = head["spec"]["containers"]
    container["resources"] = {"limits": _HEAD, "requests": dict(_HEAD)}
    # How long a driver that is told to stop may take for that: Ray itself waits for 3 seconds.
    seconds = head["spec"]["terminationGracePeriodSeconds"]
    container["env"].append({"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": str(seconds)})
    (container,) = submitter["spec"]["containers"]
    container["resources"] = {"limits": _SUBMITTER, "requests": dict(_SUBMITTER)}
    del container["args"]
    of.keep_together(worker)
    workload = of.workload(API, "RayJob", of.queued)
    workload["spec"] = {
        # No shell's `cd`: the submitter's shell reads this, and the driver's.
        "entrypoint": f"env --chdir={HOME} mcore-bundle launch ray --job={JOB}/{NAME}"
        f" --restarts={of.options.restarts}{' --preflight' if of.options.preflight else ''}",
        "submissionMode": "K8sJobMode",
        "backoffLimit": of.options.restarts,
        "shutdownAfterJobFinishes": True,
        "submitterPodTemplate": submitter,
        "rayClusterSpec": {
            "rayVersion": RAY,
            "authOptions": {"mode": "token"},
            "headGroupSpec": {
                "serviceType": "ClusterIP",
                "enableIngress": False,
                "rayStartParams": ray.started_with({"CPU": 0.0, "GPU": 0.0}),
                "template": head,
            },
            "workerGroupSpecs": [
                {
                    "groupName": GROUP,
                    "replicas": of.job.nodes,
                    "minReplicas": of.job.nodes,
                    "maxReplicas": of.job.nodes,
                    "rayStartParams": start,
                    "template": worker,
                }
            ],
        },
    }
    return [workload]


def _of_ray(of: Workload, template: dict[str, Any]) -> None:
    """Makes a pod one of the cluster, which stays until the job that was told to end has saved.

    The submitter alone is found as the job's pod: what the others write comes from it.
    """
    template["metadata"]["labels"]["app.kubernetes.io/part-of"] = template["metadata"]["labels"].pop(INSTANCE)
    (container,) = template["spec"]["containers"]
    del container["args"]  # KubeRay writes `ray start`
    lock = Path(HOME) / of.job.directory / LOCK
    container["lifecycle"] = {"preStop": {"exec": {"command": ["flock", str(lock), "true"]}}}
