"""An AscendJob of MindCluster. There is no schema of it to check against: from its operator's own sources.

Ascend/mind-cluster, component/ascend-operator: api/v1, controllers/v1/{ascendjob_validate,env,pod}.go; labels
from the samples of Ascend/mindcluster-deploy. Its variables are read by `launch.starters.ascend_operator`.
"""

import copy
from typing import Any

from bundle.targets.kubernetes.pod import Workload
from bundle.targets.kubernetes.volcano import SCHEDULER, super_pod

API = "mindxdl.gitee.com/v1"
CONTAINER, PORT_NAME, PORT = "ascend", "ascendjob-port", 2222
_RING = "ring-controller.atlas"
_QUEUE = "default"  # Volcano's own; the operator looks for a queue in any case


def job(of: Workload) -> list[dict[str, Any]]:
    """An AscendJob: one master, and workers where there are more nodes than one."""
    restarts = of.options.restarts
    ring = {_RING: "ascend-910" if of.job.generation == "a1" else "ascend-910b"}
    workload = of.workload(API, "AscendJob", {"framework": "pytorch"} | ring, super_pod(of))
    # All pods are deleted when one has failed, with the time to save, and begin again.
    workload["metadata"]["labels"] |= {"fault-scheduling": "grace", "fault-retry-times": str(restarts)}
    template = of.template(of.words, CONTAINER)
    template["metadata"]["labels"] |= ring
    template["spec"]["schedulerName"] = SCHEDULER
    template["spec"]["containers"][0]["ports"] = [{"name": PORT_NAME, "containerPort": PORT}]

    def replicas(count: int) -> dict[str, Any]:
        return {"replicas": count, "restartPolicy": "Never", "template": copy.deepcopy(template)}

    workers = of.job.nodes - 1
    workload["spec"] = {
        "schedulerName": SCHEDULER,
        "runPolicy": {
            "backoffLimit": restarts,
            "ttlSecondsAfterFinished": of.options.keep_seconds,
            "schedulingPolicy": {
                "minAvailable": of.job.nodes,
                "queue": of.options.queue or _QUEUE,
                **({"priorityClass": of.options.priority} if of.options.priority else {}),
            },
        },
        "successPolicy": "AllWorkers",
        "replicaSpecs": {"Master": replicas(1)} | ({"Worker": replicas(workers)} if workers else {}),
    }
    return [workload]
