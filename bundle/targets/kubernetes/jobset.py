"""An indexed Job with its headless Service, and the JobSet around such a Job.

Fields and their meaning: kubernetes.io/docs/concepts/workloads/controllers/job, jobset.sigs.k8s.io.
"""

from typing import Any

from bundle.errors import ExitCode
from bundle.launch.starters import DEFAULT_PORT
from bundle.targets.kubernetes.pod import CONTAINER_NAME, PERMANENT_EXIT_CODES, Workload

API, JOB_API = "jobset.x-k8s.io/v1alpha2", "batch/v1"
REPLICATED_JOB_NAME = "node"
_INDEX_VARIABLE = "JOB_COMPLETION_INDEX"


def build_indexed_job(workload: Workload) -> list[dict[str, Any]]:
    """Return a Service and an indexed Job, which need nothing installed; a lost pod ends the Job."""
    service = workload.build_manifest_skeleton("v1", "Service")
    service["spec"] = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": workload.name},
        "ports": [{"name": "rendezvous", "port": DEFAULT_PORT}],
    }
    manifest = workload.build_annotated_manifest_skeleton(JOB_API, "Job", workload.kueue_queue_name_label)
    manifest["spec"] = build_job_spec(
        workload, workload.build_container_arguments(f"{workload.name}-0.{workload.name}", _INDEX_VARIABLE)
    )
    manifest["spec"]["ttlSecondsAfterFinished"] = workload.options.keep_seconds
    manifest["spec"]["template"]["spec"]["subdomain"] = workload.name
    return [service, manifest]


def build_jobset(workload: Workload) -> list[dict[str, Any]]:
    """Return a JobSet, which starts all pods again when one is lost."""
    manifest = workload.build_annotated_manifest_skeleton(API, "JobSet", workload.kueue_queue_name_label)
    first = f"{workload.name}-{REPLICATED_JOB_NAME}-0-0.{workload.name}"
    manifest["spec"] = build_jobset_spec(
        workload, build_job_spec(workload, workload.build_container_arguments(first, _INDEX_VARIABLE))
    )
    manifest["spec"]["ttlSecondsAfterFinished"] = workload.options.keep_seconds
    return [manifest]


def build_jobset_spec(
    workload: Workload, spec: dict[str, Any], labels: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return the specification of a JobSet around one Job; `labels` are those of the Job's template."""
    metadata = {"metadata": {"labels": labels}} if labels else {}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": workload.name},
        # A replaced pod alone finds no ranks to join, so all pods start again from the last checkpoint.
        "failurePolicy": {
            "maxRestarts": workload.options.restarts,
            "rules": [{"name": "never", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        },
        "replicatedJobs": [
            {"name": REPLICATED_JOB_NAME, "replicas": 1, "template": metadata | {"spec": spec}}
        ],
    }


def build_job_spec(workload: Workload, arguments: list[str]) -> dict[str, Any]:
    """Return the specification of a Job with one pod for each node."""
    template = workload.build_template(arguments)
    workload.add_kueue_topology_annotation(template)
    return {
        "completionMode": "Indexed",
        "completions": workload.job.nodes,
        "parallelism": workload.job.nodes,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                _build_exit_rule("FailJob", PERMANENT_EXIT_CODES),
                # The code of a node that was told to save and end, as all nodes were; the pods start again.
                _build_exit_rule("Ignore", [int(ExitCode.PREEMPTED)]),
            ]
        },
        "template": template,
    }


def _build_exit_rule(action: str, codes: list[int]) -> dict[str, Any]:
    return {
        "action": action,
        "onExitCodes": {"containerName": CONTAINER_NAME, "operator": "In", "values": codes},
    }
