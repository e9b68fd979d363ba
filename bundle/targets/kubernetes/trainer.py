"""Kubeflow Trainer v2: a TrainJob, and the ClusterTrainingRuntime that it runs in.

Its controller makes a JobSet of both and tells the container, which must be called `node`, by torchrun's own
variables (PET_*) which node it is: `launch.starters` reads them. Fields: kubeflow/trainer, its CRDs and
pkg/runtime/framework/plugins/{torch,jobset}. A TrainJob adds volumes in another way in each of the
releases, so that they are those of its runtime, and each job has a runtime of its own.
"""

from typing import Any

from bundle.files import digest_json
from bundle.targets.kubernetes.jobset import build_job_spec, build_jobset_spec
from bundle.targets.kubernetes.pod import Workload

API = "trainer.kubeflow.org/v1alpha1"
RUNTIME_KIND = "ClusterTrainingRuntime"


def build_trainjob(workload: Workload) -> list[dict[str, Any]]:
    """A runtime and its TrainJob. The runtime's name follows from its content: equal ones are one."""
    spec = build_job_spec(workload, workload.arguments)
    container = spec["template"]["spec"]["containers"][0]
    job_fields = {key: container.pop(key) for key in ("image", "args", "resources")}
    # The controller counts the pods, which Jobs of a runtime must not say.
    del spec["completions"], spec["parallelism"]
    container["image"] = job_fields["image"]
    content = {
        "mlPolicy": {"numNodes": workload.job.nodes, "torch": {}},
        "template": {
            "spec": build_jobset_spec(
                workload, spec, {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
            )
        },
    }
    runtime = workload.build_object(API, RUNTIME_KIND, f"{workload.name}-{digest_json(content)}")
    runtime["metadata"].pop("namespace", None)  # it lies in none
    runtime["metadata"]["labels"]["trainer.kubeflow.org/framework"] = "torch"
    runtime["spec"] = content
    manifest = workload.build_manifest(API, "TrainJob", workload.queue_labels)
    manifest["spec"] = {
        "runtimeRef": {"kind": RUNTIME_KIND, "name": runtime["metadata"]["name"]},
        "trainer": {
            "image": job_fields["image"],
            "args": job_fields["args"],
            "numNodes": workload.job.nodes,
            "numProcPerNode": workload.job.per_node,
            "resourcesPerNode": job_fields["resources"],
        },
    }
    return [runtime, manifest]
