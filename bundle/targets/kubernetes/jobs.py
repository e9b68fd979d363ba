"""A job on a cluster: made, asked about and stopped. It is known as FORM/NAMESPACE/NAME.

What has not the labels of that very job is read, and never changed.
"""

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bundle.errors import ExitCode, LaunchUnavailable
from bundle.launch.job import Job
from bundle.targets.kubernetes import FORMS, build_objects, client
from bundle.targets.kubernetes.logs import PodLogs
from bundle.targets.kubernetes.options import KubernetesOptions
from bundle.targets.kubernetes.pod import INSTANCE_LABEL, is_from_job
from bundle.targets.states import JobState, find_exit_code, poll_states

_log = logging.getLogger(__name__)

POLL_SECONDS = 5.0


class _UnknownOutcome(LaunchUnavailable):
    """Whether the workload was made is not known: what it needs must stay."""


def submit(job: Job, options: KubernetesOptions) -> str:
    """Makes the objects of a job; returns what the job is called.

    All of them are tried before one is made; what pods need is made before the workload, goes with it, and
    at once where the workload is not made. Raises LaunchUnavailable with everything that the cluster has
    against them, and where the job runs already.
    """
    options = replace(options, namespace=options.namespace or client.get_namespace())
    *dependencies, workload = [_to_json_value(manifest) for manifest in build_objects(job, options)]
    name = f"{options.form}/{options.namespace}/{workload['metadata']['name']}"
    _remove_ended_job(name)
    # What lies in no namespace cannot go with the workload; its name says what is in it.
    owned = [manifest for manifest in dependencies if "namespace" in manifest["metadata"]]
    unowned = [manifest for manifest in dependencies if manifest not in owned]
    created_objects: list[dict[str, Any]] = []
    try:
        _check_objects(unowned)
        _make_objects(unowned, created_objects)  # else the cluster refuses the workload
        _check_objects([*owned, workload])
        _make_objects(owned, created_objects)
        created_workload = _make_workload(workload, name)
    except LaunchUnavailable as error:
        if not isinstance(error, _UnknownOutcome):
            _remove_objects(created_objects)
        raise
    owner = {key: workload[key] for key in ("apiVersion", "kind")}
    owner |= {"name": workload["metadata"]["name"], "uid": created_workload["metadata"]["uid"]}
    for manifest in owned:
        try:
            client.set_owner(manifest, owner)
        except LaunchUnavailable as error:
            _log.warning("%s: %s stays when the job has gone: %s", name, _format_object(manifest), error)
    return name


def query_state(name: str) -> JobState:
    """What the cluster says of a job. Raises LaunchUnavailable where it knows of none."""
    now = _query_workload(name)
    if now is None:
        raise LaunchUnavailable(f"kubernetes:{name}: no such job; it was stopped, or its time is over")
    if now.code is not None or now.name != "PENDING":
        return now
    # A pod that had to go stays listed beside the one that came for it.
    pods = [pod for pod in _list_pods(name) if pod.status.phase not in ("Succeeded", "Failed")]
    if pods and all(pod.status.phase == "Running" for pod in pods):
        return JobState("RUNNING", now.reason, None)
    conditions = [
        condition for pod in pods for condition in pod.status.conditions or () if condition.status == "False"
    ]
    waits = next((condition.message for condition in conditions if condition.type == "PodScheduled"), None)
    return JobState("PENDING", waits or now.reason, None)


def stop(name: str) -> None:
    """Has a job save and end: its pods are told to, and have their time for that; then its objects go."""
    existing = client.find_object(_identify_workload(name))
    if existing is None:
        query_state(name)  # says that there is none
    else:
        _refuse_foreign_workload(existing, name)
        client.delete(existing)


def read_log(name: str) -> str:
    """All that the pods of a job have written that are still there, one after the other."""
    _, namespace, _ = name.split("/")
    query_state(name)
    return "".join(client.read_log(namespace, pod.metadata.name) for pod in _filter_started(_list_pods(name)))


def follow(name: str, seconds: float = POLL_SECONDS) -> Iterator[str]:
    """What the pods of a job write, as it comes, until it has ended; of many, some at a time."""
    streams = PodLogs(name.split("/")[1])
    for _ in _poll_states(name, seconds):
        streams.open(_list_writing_pods(name))
        yield from streams.read_lines()
    pods, deadline = _list_writing_pods(name), time.monotonic() + client.TIMEOUT_SECONDS
    while streams.open(pods, last=True) and time.monotonic() < deadline:
        yield from streams.read_lines()
        time.sleep(min(seconds, 0.1))
    yield from streams.read_lines()


def wait(name: str, seconds: float = POLL_SECONDS) -> int:
    """The exit code of a job, once it has ended: that of the pod that failed first."""
    return find_exit_code(_poll_states(name, seconds))


def _poll_states(name: str, seconds: float) -> Iterator[JobState]:
    """Yield the states of a job that the cluster knows. Raises LaunchUnavailable where it knows of none."""
    is_known = False

    def query() -> JobState:
        nonlocal is_known
        state = _query_workload(name)
        if state is None and not is_known:
            return query_state(name)  # raises
        is_known = True
        return state or JobState("STOPPED", "its objects are gone", int(ExitCode.TERMINATED))

    yield from poll_states(query, seconds)


def _query_workload(name: str) -> JobState | None:
    """What the workload's own status says; None where there is no such workload."""
    workload = client.find_object(_identify_workload(name))
    return None if workload is None else _read_state(name, workload)


def _read_state(name: str, workload: dict[str, Any]) -> JobState:
    """How a job is whose workload was found."""
    outcome = FORMS[name.partition("/")[0]].read_outcome(workload.get("status") or {})
    reason = outcome.reason
    if outcome.succeeded:
        return JobState("COMPLETED", "", int(ExitCode.OK))
    if outcome.succeeded is False:
        return JobState(
            "FAILED", reason, _read_exit_code(_list_pods(name)) if outcome.code is None else outcome.code
        )
    if workload["metadata"].get("deletionTimestamp"):
        return JobState("STOPPING", "its pods save and end", None)
    suspended = (workload.get("spec") or {}).get("suspend")
    return JobState("SUSPENDED" if suspended else "PENDING", reason, None)


def _read_exit_code(pods: list[Any]) -> int:
    """The code of the pod that failed first; of a job whose pods are gone, that of any failure.

    Pods that were preempted are replaced, and say something of the end only where no other has failed.
    """
    ends = [
        (code == ExitCode.PREEMPTED, status.state.terminated.finished_at, code)
        for pod in pods
        for status in pod.status.container_statuses or ()
        if status.state.terminated is not None and (code := status.state.terminated.exit_code)
    ]
    return min(ends)[-1] if ends else int(ExitCode.JOB_FAILED)


def _filter_started(pods: list[Any]) -> list[Any]:
    """The pods that have written, or may have."""
    return [pod for pod in pods if pod.status.phase in ("Running", "Succeeded", "Failed")]


def _list_pods(name: str) -> list[Any]:
    _, namespace, job_name = name.split("/")
    return client.list_pods(namespace, f"{INSTANCE_LABEL}={job_name}")


def _list_writing_pods(name: str) -> list[Any]:
    """The pods that write; none where no API server answers: whoever looks at the job notices."""
    try:
        return _filter_started(_list_pods(name))
    except client.ServerUnreachable:
        return []


def _check_objects(manifests: list[dict[str, Any]]) -> None:
    """Raises LaunchUnavailable with all that the cluster has against objects, none of which it makes."""
    if objections := [objection for manifest in manifests if (objection := client.find_objection(manifest))]:
        raise LaunchUnavailable("the cluster does not take the job", objections)


def _make_objects(manifests: list[dict[str, Any]], created_objects: list[dict[str, Any]]) -> None:
    """Makes objects, where they are not there already, and adds to `created_objects` what was made."""
    for manifest in manifests:
        if created := client.make(manifest):
            created_objects.append(manifest | {"metadata": created["metadata"]})


def _make_workload(workload: dict[str, Any], name: str) -> dict[str, Any]:
    """Makes the workload, and returns it. Raises LaunchUnavailable; _Unknown where it may have been made."""
    try:
        created = client.make(workload)
    except client.ServerUnreachable as error:
        try:
            created = client.find_object(workload)  # the answer was lost, or the question
        except LaunchUnavailable:
            status = f"`mcore-bundle launch status kubernetes:{name}` says whether it was made"
            raise _UnknownOutcome(f"{error}; {status}, and the same command makes it if not") from error
        if created is None:
            raise
    if created is None:
        raise LaunchUnavailable(f"kubernetes:{name}: somebody else has made it at the same time")
    return created


def _remove_objects(created_objects: list[dict[str, Any]]) -> None:
    """Removes what was made for a workload that is not."""
    for manifest in reversed(created_objects):
        try:
            client.delete(manifest, unchanged=True)
        except LaunchUnavailable as error:
            _log.warning("%s is left: %s", _format_object(manifest), error)


def _remove_ended_job(name: str) -> None:
    """Removes the job of that name where it has ended. Raises LaunchUnavailable where it has not."""
    existing = client.find_object(_identify_workload(name))
    if existing is None:
        return
    _refuse_foreign_workload(existing, name)
    if _read_state(name, existing).code is None:
        raise LaunchUnavailable(
            f"kubernetes:{name} is there, and has not ended: `mcore-bundle launch logs kubernetes:{name}`,"
            " or another --name"
        )
    client.delete(existing)
    for _ in range(client.TIMEOUT_SECONDS):
        if client.find_object(existing) is None:
            return
        time.sleep(1)
    raise LaunchUnavailable(f"kubernetes:{name}: has ended, and its objects do not go")


def _refuse_foreign_workload(manifest: dict[str, Any], name: str) -> None:
    """Raises LaunchUnavailable for a workload that was not made by us."""
    if not is_from_job(manifest, manifest["metadata"]["name"]):
        raise LaunchUnavailable(f"kubernetes:{name}: was not made by mcore-bundle, and is left as it is")


def _identify_workload(name: str) -> dict[str, Any]:
    """The workload of a job, as far as its name says it."""
    form, namespace, job_name = name.split("/")
    metadata = {"namespace": namespace, "name": job_name}
    return {"apiVersion": FORMS[form].api, "kind": FORMS[form].kind, "metadata": metadata}


def _format_object(manifest: dict[str, Any]) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def _to_json_value(value: Any) -> Any:
    """The value as JSON has it: texts that are nothing more."""
    return json.loads(json.dumps(value))
