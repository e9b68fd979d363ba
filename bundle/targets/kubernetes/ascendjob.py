"""An AscendJob of MindCluster, written after the sources and the definition of its operator.

Ascend/mind-cluster, component/ascend-operator: build/ascend-operator.yaml, api/v1, controllers/v1/. The
labels come from the samples of Ascend/mindcluster-deploy. `launch.starters.read_ascend_operator` reads its
variables.
"""

import copy
from typing import Any

from bundle.targets.kubernetes.pod import Workload
from bundle.targets.kubernetes.volcano import SCHEDULER_NAME, build_super_pod_annotation

API_VERSION = "mindxdl.gitee.com/v1"
CONTAINER, PORT_NAME, PORT = "ascend", "ascendjob-port", 2222
_RING_LABEL = "ring-controller.atlas"
_DEFAULT_VOLCANO_QUEUE = "default"  # Volcano's default; the operator always needs a queue


def build_ascendjob(workload: Workload) -> list[dict[str, Any]]:
    """Return an AscendJob: one master, and workers for the nodes after the first."""
    restarts = workload.options.restarts
    ring = {_RING_LABEL: "ascend-910" if workload.job.generation == "a1" else "ascend-910b"}
    manifest = workload.build_annotated_manifest_skeleton(
        API_VERSION, "AscendJob", {"framework": "pytorch"} | ring, build_super_pod_annotation(workload)
    )
    # When one pod fails, all pods are deleted with time to save, and start again.
    manifest["metadata"]["labels"] |= {"fault-scheduling": "grace", "fault-retry-times": str(restarts)}
    template = workload.build_template(workload.train_arguments_without_rendezvous, CONTAINER)
    template["metadata"]["labels"] |= ring
    template["spec"]["schedulerName"] = SCHEDULER_NAME
    ports = template["spec"]["containers"][0].setdefault("ports", [])
    ports.append({"name": PORT_NAME, "containerPort": PORT})

    def build_replicas(count: int) -> dict[str, Any]:
        return {"replicas": count, "restartPolicy": "Never", "template": copy.deepcopy(template)}

    workers = workload.job.nodes - 1
    manifest["spec"] = {
        "schedulerName": SCHEDULER_NAME,
        "runPolicy": {
            "backoffLimit": restarts,
            "ttlSecondsAfterFinished": workload.options.keep_seconds,
            "schedulingPolicy": {
                "minAvailable": workload.job.nodes,
                "queue": workload.options.queue or _DEFAULT_VOLCANO_QUEUE,
                **({"priorityClass": workload.options.priority} if workload.options.priority else {}),
            },
        },
        "successPolicy": "AllWorkers",
        "replicaSpecs": {"Master": build_replicas(1)}
        | ({"Worker": build_replicas(workers)} if workers else {}),
    }
    return [manifest]
