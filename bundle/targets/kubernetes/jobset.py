"""An indexed Job with its headless Service, and the JobSet around such a Job.

Fields and their meaning: kubernetes.io/docs/concepts/workloads/controllers/job, jobset.sigs.k8s.io.
"""

from typing import Any

from bundle.errors import ExitCode
from bundle.launch.starters import DEFAULT_PORT
from bundle.targets.kubernetes.pod import CONTAINER, NEVER, Workload

API, JOB_API = "jobset.x-k8s.io/v1alpha2", "batch/v1"
REPLICATED = "node"
_INDEX = "JOB_COMPLETION_INDEX"


def job(of: Workload) -> list[dict[str, Any]]:
    """A Service and an indexed Job, which need nothing installed; a pod that is lost ends the Job."""
    service = of.object("v1", "Service")
    service["spec"] = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": of.name},
        "ports": [{"name": "rendezvous", "port": DEFAULT_PORT}],
    }
    workload = of.workload(JOB_API, "Job", of.queued)
    workload["spec"] = indexed(of, of.words_at(f"{of.name}-0.{of.name}", _INDEX))
    workload["spec"]["ttlSecondsAfterFinished"] = of.options.keep_seconds
    workload["spec"]["template"]["spec"]["subdomain"] = of.name
    return [service, workload]


def jobset(of: Workload) -> list[dict[str, Any]]:
    """A JobSet, which starts all pods again when one is lost."""
    workload = of.workload(API, "JobSet", of.queued)
    first = f"{of.name}-{REPLICATED}-0-0.{of.name}"
    workload["spec"] = set_of(of, indexed(of, of.words_at(first, _INDEX)))
    workload["spec"]["ttlSecondsAfterFinished"] = of.options.keep_seconds
    return [workload]


def set_of(of: Workload, spec: dict[str, Any], labels: dict[str, str] | None = None) -> dict[str, Any]:
    """The specification of a JobSet around one Job; `labels` are those of its template."""
    metadata = {"metadata": {"labels": labels}} if labels else {}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": of.name},
        # One pod that is replaced finds no ranks to join: all of them begin again, from the last checkpoint.
        "failurePolicy": {
            "maxRestarts": of.options.restarts,
            "rules": [{"name": "never", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        },
        "replicatedJobs": [{"name": REPLICATED, "replicas": 1, "template": metadata | {"spec": spec}}],
    }


def indexed(of: Workload, words: list[str]) -> dict[str, Any]:
    """The specification of a Job with a pod for every node."""
    template = of.template(words)
    of.keep_together(template)
    return {
        "completionMode": "Indexed",
        "completions": of.job.nodes,
        "parallelism": of.job.nodes,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                _on("FailJob", NEVER),
                # Told to save and to end, as all nodes of the job do then: its pods begin again.
                _on("Ignore", [int(ExitCode.PREEMPTED)]),
            ]
        },
        "template": template,
    }


def _on(action: str, codes: list[int]) -> dict[str, Any]:
    return {
        "action": action,
        "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": codes},
    }
