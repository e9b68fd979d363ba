"""Kubeflow Trainer v2: a TrainJob, and the ClusterTrainingRuntime that it runs in.

Its controller makes a JobSet of both and tells the container, which must be called `node`, by torchrun's own
variables (PET_*) which node it is: `launch.starters` reads them. Fields: kubeflow/trainer, its CRDs and
pkg/runtime/framework/plugins/{torch,jobset}. A TrainJob adds volumes in another way in each of the
releases, so that they are those of its runtime, and each job has a runtime of its own.
"""

from typing import Any

from bundle.files import json_digest
from bundle.targets.kubernetes.jobset import indexed, set_of
from bundle.targets.kubernetes.pod import Workload

API = "trainer.kubeflow.org/v1alpha1"
RUNTIME = "ClusterTrainingRuntime"


def trainjob(of: Workload) -> list[dict[str, Any]]:
    """A runtime and its TrainJob. The runtime's name follows from its content: equal ones are one."""
    spec = indexed(of, of.words)
    container = spec["template"]["spec"]["containers"][0]
    of_the_job = {key: container.pop(key) for key in ("image", "args", "resources")}
    # The controller counts the pods, which Jobs of a runtime must not say.
    del spec["completions"], spec["parallelism"]
    container["image"] = of_the_job["image"]
    content = {
        "mlPolicy": {"numNodes": of.job.nodes, "torch": {}},
        "template": {"spec": set_of(of, spec, {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"})},
    }
    runtime = of.object(API, RUNTIME, f"{of.name}-{json_digest(content)}")
    runtime["metadata"].pop("namespace", None)  # it lies in none
    runtime["metadata"]["labels"]["trainer.kubeflow.org/framework"] = "torch"
    runtime["spec"] = content
    workload = of.workload(API, "TrainJob", of.queued)
    workload["spec"] = {
        "runtimeRef": {"kind": RUNTIME, "name": runtime["metadata"]["name"]},
        "trainer": {
            "image": of_the_job["image"],
            "args": of_the_job["args"],
            "numNodes": of.job.nodes,
            "numProcPerNode": of.job.per_node,
            "resourcesPerNode": of_the_job["resources"],
        },
    }
    return [runtime, workload]
