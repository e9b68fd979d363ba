"""The creation, state, log and end of a job on a cluster. A job is identified by FORM/NAMESPACE/NAME.

Objects without the labels of this job are read, and never changed.
"""

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bundle.errors import ExitCode, TargetUnavailable
from bundle.launch.job import Job
from bundle.targets.kubernetes import FORMS_BY_NAME, build_objects, client
from bundle.targets.kubernetes.logs import PodLogStreams
from bundle.targets.kubernetes.options import KubernetesOptions
from bundle.targets.kubernetes.pod import DIRECTORY_ANNOTATION, INSTANCE_LABEL, is_from_job
from bundle.targets.kubernetes.trainer import TRAINING_RUNTIME_KIND
from bundle.targets.states import JobState, ListedJob, find_exit_code, yield_polled_states

_log = logging.getLogger(__name__)

POLL_SECONDS = 5.0


class _UnknownOutcome(TargetUnavailable):
    """The error that it is unknown whether the workload was created; the objects that it needs must stay."""


def submit(job: Job, options: KubernetesOptions) -> str:
    """Create the objects of a job and return the name of the job.

    The server checks all objects before one is created. The objects that pods need are created before the
    workload and deleted with it, or at once where the workload is not created. Raise TargetUnavailable with
    all objections of the cluster, and where the job runs already.
    """
    options = replace(options, namespace=options.namespace or client.get_namespace())
    *dependencies, workload = [_to_builtin_json_types(manifest) for manifest in build_objects(job, options)]
    name = f"{options.form}/{options.namespace}/{workload['metadata']['name']}"
    _remove_ended_refuse_running_job(name)
    # A cluster accepts a workload only after the runtime that it names.
    runtimes = [manifest for manifest in dependencies if manifest["kind"] == TRAINING_RUNTIME_KIND]
    pod_inputs = [manifest for manifest in dependencies if manifest not in runtimes]
    created_objects: list[dict[str, Any]] = []
    try:
        _dry_run_objects(runtimes)
        _create_missing_objects(runtimes, created_objects)
        _dry_run_objects([*pod_inputs, workload])
        _create_missing_objects(pod_inputs, created_objects)
        created_workload = _create_workload_or_raise(workload, name)
    except TargetUnavailable as error:
        if not isinstance(error, _UnknownOutcome):
            _remove_objects(created_objects)
        raise
    owner = {key: workload[key] for key in ("apiVersion", "kind")}
    owner |= {"name": workload["metadata"]["name"], "uid": created_workload["metadata"]["uid"]}
    for manifest in dependencies:
        try:
            client.create_or_patch_with_owner(manifest, owner)
        except TargetUnavailable as error:
            text = "%s: deleting the job will not delete %s, because its ownerReferences could not be set: %s"
            _log.warning(text, name, _format_object(manifest), error)
    return name


def list_jobs() -> Iterator[ListedJob]:
    """Yield the jobs of the current context's namespace, as a cluster does not tell users apart.

    A form whose workloads may not be listed is a warning.
    """
    namespace = client.get_namespace()
    for form, (api, kind, *_) in FORMS_BY_NAME.items():
        try:
            workloads = client.list_managed_workloads(api, kind, namespace)
        except client.ServerUnreachable:
            raise
        except TargetUnavailable as error:
            _log.warning("--form %s: the jobs in namespace %s are not listed: %s", form, namespace, error)
            continue
        for workload in workloads:
            metadata = workload["metadata"]
            name = f"{form}/{namespace}/{metadata['name']}"
            if is_from_job(workload, metadata["name"]):
                state = _refine_pending_state(name, _read_state(name, workload))
                directory = Path((metadata.get("annotations") or {}).get(DIRECTORY_ANNOTATION, ""))
                yield ListedJob(name, state.name, state.has_ended, directory)


def query_state(name: str) -> JobState:
    """Return the state of a job as the cluster reports it.

    Raise TargetUnavailable where the cluster does not know the job.
    """
    now = _query_workload(name)
    if now is None:
        raise TargetUnavailable(f"kubernetes:{name}: no such job; it was stopped, or it expired")
    return _refine_pending_state(name, now)


def _refine_pending_state(name: str, now: JobState) -> JobState:
    """Return the state of a job in state `now`, which for a pending job depends on its pods."""
    if now.code is not None or now.name != "PENDING":
        return now
    # A pod that was replaced stays listed beside its replacement.
    pods = [pod for pod in _list_pods(name) if pod.status.phase not in ("Succeeded", "Failed")]
    if pods and all(pod.status.phase == "Running" for pod in pods):
        return JobState("RUNNING", now.reason, None)
    conditions = [
        condition for pod in pods for condition in pod.status.conditions or () if condition.status == "False"
    ]
    waits = next((condition.message for condition in conditions if condition.type == "PodScheduled"), None)
    return JobState("PENDING", waits or now.reason, None)


def request_stop(name: str) -> None:
    """Tell a job to save and end: its pods get their time for that; then its objects are deleted."""
    existing = client.find_object(_build_lookup_manifest(name))
    if existing is None:
        query_state(name)  # raises, as there is none
    else:
        _refuse_foreign_workload(existing, name)
        client.delete(existing)


def read_log(name: str) -> str:
    """Return everything that the existing pods of a job have written, one pod after the other."""
    _, namespace, _ = name.split("/")
    query_state(name)
    return "".join(client.read_log(namespace, pod.metadata.name) for pod in _filter_started(_list_pods(name)))


def follow(name: str, seconds: float = POLL_SECONDS) -> Iterator[str]:
    """Yield what the pods of a job write, as it comes, until the job has ended.

    Of many pods, at most MOST_STREAMS are read at a time.
    """
    streams = PodLogStreams(name.split("/")[1])
    for _ in _poll_states(name, seconds):
        streams.has_incomplete_logs_after_reopening(_list_started_pods(name))
        yield from streams.read_new_lines()
    pods, deadline = _list_started_pods(name), time.monotonic() + client.TIMEOUT_SECONDS
    while streams.has_incomplete_logs_after_reopening(pods, last=True) and time.monotonic() < deadline:
        yield from streams.read_new_lines()
        time.sleep(min(seconds, 0.1))
    yield from streams.read_new_lines()


def wait(name: str, seconds: float = POLL_SECONDS) -> int:
    """Wait until a job has ended and return its exit code: that of the pod that failed first."""
    return find_exit_code(_poll_states(name, seconds))


def _poll_states(name: str, seconds: float) -> Iterator[JobState]:
    """Yield the states of a job. Raise TargetUnavailable where the cluster does not know the job."""
    is_known = False

    def query() -> JobState:
        nonlocal is_known
        state = _query_workload(name)
        if state is None and not is_known:
            return query_state(name)  # raises
        is_known = True
        return state or JobState(
            "STOPPED", "the job's Kubernetes objects were deleted", int(ExitCode.TERMINATED)
        )

    yield from yield_polled_states(query, seconds)


def _query_workload(name: str) -> JobState | None:
    """Return the state in the workload's own status; None where there is no such workload."""
    workload = client.find_object(_build_lookup_manifest(name))
    return None if workload is None else _read_state(name, workload)


def _read_state(name: str, workload: dict[str, Any]) -> JobState:
    """Return the state of a job from its workload."""
    outcome = FORMS_BY_NAME[name.partition("/")[0]].read_outcome(workload.get("status") or {})
    reason = outcome.reason
    if outcome.succeeded:
        return JobState("COMPLETED", "", int(ExitCode.OK))
    if outcome.succeeded is False:
        return JobState(
            "FAILED",
            reason,
            _find_first_failure_exit_code(_list_pods(name)) if outcome.code is None else outcome.code,
        )
    if workload["metadata"].get("deletionTimestamp"):
        return JobState("STOPPING", "its pods save and end", None)
    suspended = (workload.get("spec") or {}).get("suspend")
    return JobState("SUSPENDED" if suspended else "PENDING", reason, None)


def _find_first_failure_exit_code(pods: list[Any]) -> int:
    """Return the exit code of the pod that failed first; that of a failed job where no pod is left.

    Preempted pods are replaced; their code counts only where no other pod has failed.
    """
    ends = [
        (code == ExitCode.PREEMPTED, status.state.terminated.finished_at, code)
        for pod in pods
        for status in pod.status.container_statuses or ()
        if status.state.terminated is not None and (code := status.state.terminated.exit_code)
    ]
    return min(ends)[-1] if ends else int(ExitCode.JOB_FAILED)


def _filter_started(pods: list[Any]) -> list[Any]:
    """Return the pods that have written, or may have."""
    return [pod for pod in pods if pod.status.phase in ("Running", "Succeeded", "Failed")]


def _list_pods(name: str) -> list[Any]:
    _, namespace, job_name = name.split("/")
    return client.list_pods(namespace, f"{INSTANCE_LABEL}={job_name}")


def _list_started_pods(name: str) -> list[Any]:
    """Return the pods that may write; none where no API server answers.

    The poll of the job's state reports that.
    """
    try:
        return _filter_started(_list_pods(name))
    except client.ServerUnreachable:
        return []


def _dry_run_objects(manifests: list[dict[str, Any]]) -> None:
    """Raise TargetUnavailable with all objections of the cluster to objects; nothing is created."""
    if objections := [objection for manifest in manifests if (objection := client.find_objection(manifest))]:
        raise TargetUnavailable("the cluster does not accept the job", objections)


def _create_missing_objects(manifests: list[dict[str, Any]], created_objects: list[dict[str, Any]]) -> None:
    """Create the objects that do not exist yet, and add them to `created_objects`."""
    for manifest in manifests:
        if created := client.create_if_absent(manifest):
            created_objects.append(manifest | {"metadata": created["metadata"]})


def _create_workload_or_raise(workload: dict[str, Any], name: str) -> dict[str, Any]:
    """Create the workload and return it.

    Raise TargetUnavailable where it is not created, and _UnknownOutcome where it may have been created.
    """
    try:
        created = client.create_if_absent(workload)
    except client.ServerUnreachable as error:
        try:
            created = client.find_object(workload)  # the answer or the request was lost
        except TargetUnavailable:
            raise _UnknownOutcome(
                f"{error}; it is unknown whether the job was created. Check `mcore-bundle launch status"
                f" kubernetes:{name}`. If the job does not exist, run the same launch command again"
            ) from error
        if created is None:
            raise
    if created is None:
        raise TargetUnavailable(f"kubernetes:{name}: another client created it at the same time")
    return created


def _remove_objects(created_objects: list[dict[str, Any]]) -> None:
    """Remove the objects that were created for a workload that was not."""
    for manifest in reversed(created_objects):
        try:
            client.delete(manifest, unchanged=True)
        except TargetUnavailable as error:
            _log.warning("%s was not deleted: %s", _format_object(manifest), error)


def _remove_ended_refuse_running_job(name: str) -> None:
    """Remove the job of that name where it has ended. Raise TargetUnavailable where it has not."""
    existing = client.find_object(_build_lookup_manifest(name))
    if existing is None:
        return
    _refuse_foreign_workload(existing, name)
    if _read_state(name, existing).code is None:
        raise TargetUnavailable(
            f"kubernetes:{name} exists and has not ended. Follow it with `mcore-bundle launch logs"
            f" kubernetes:{name}`, or choose another --name"
        )
    client.delete(existing)
    for _ in range(client.TIMEOUT_SECONDS):
        if client.find_object(existing) is None:
            return
        time.sleep(1)
    raise TargetUnavailable(f"kubernetes:{name}: has ended, but its objects were not deleted in time")


def _refuse_foreign_workload(manifest: dict[str, Any], name: str) -> None:
    """Raise TargetUnavailable for a workload that mcore-bundle did not create."""
    if not is_from_job(manifest, manifest["metadata"]["name"]):
        raise TargetUnavailable(f"kubernetes:{name}: was not created by mcore-bundle, and is left unchanged")


def _build_lookup_manifest(name: str) -> dict[str, Any]:
    """Return the API version, kind, namespace and name of a job's workload, from the job's name."""
    form, namespace, job_name = name.split("/")
    metadata = {"namespace": namespace, "name": job_name}
    return {"apiVersion": FORMS_BY_NAME[form].api, "kind": FORMS_BY_NAME[form].kind, "metadata": metadata}


def _format_object(manifest: dict[str, Any]) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def _to_builtin_json_types(value: Any) -> Any:
    """Return the value as plain JSON data, without subclasses of str."""
    return json.loads(json.dumps(value))
