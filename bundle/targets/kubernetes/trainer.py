"""Kubeflow Trainer v2: a TrainJob, and the TrainingRuntime that it runs in.

The controller makes a JobSet of both. It gives the container, which must be named `node`, its place in
torchrun's variables (PET_*), which `launch.starters` reads. Fields: kubeflow/trainer, its CRDs and
pkg/runtime/framework/plugins/{torch,jobset}. Each release lets a TrainJob add volumes in another way. Volumes
therefore belong to the runtime, and each job has its own runtime.
"""

from typing import Any

from bundle.files import compute_short_json_digest
from bundle.targets.kubernetes.jobset import build_job_spec, build_jobset_spec
from bundle.targets.kubernetes.pod import Workload

API_VERSION = "trainer.kubeflow.org/v1alpha1"
TRAINING_RUNTIME_KIND = "TrainingRuntime"


def build_trainjob(workload: Workload) -> list[dict[str, Any]]:
    """Return a runtime and its TrainJob; the runtime's name is a digest of its content."""
    spec = build_job_spec(workload, workload.train_arguments_without_rendezvous)
    container = spec["template"]["spec"]["containers"][0]
    job_fields = {key: container.pop(key) for key in ("image", "args", "resources")}
    # The controller sets the number of pods; Jobs of a runtime must not.
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
    runtime = workload.build_manifest_skeleton(
        API_VERSION, TRAINING_RUNTIME_KIND, f"{workload.name}-{compute_short_json_digest(content)}"
    )
    runtime["metadata"]["labels"]["trainer.kubeflow.org/framework"] = "torch"
    runtime["spec"] = content
    manifest = workload.build_annotated_manifest_skeleton(
        API_VERSION, "TrainJob", workload.kueue_queue_name_label
    )
    manifest["spec"] = {
        "runtimeRef": {"kind": TRAINING_RUNTIME_KIND, "name": runtime["metadata"]["name"]},
        "trainer": {
            "image": job_fields["image"],
            "args": job_fields["args"],
            "numNodes": workload.job.nodes,
            "numProcPerNode": workload.job.per_node,
            "resourcesPerNode": job_fields["resources"],
        },
    }
    return [runtime, manifest]
