"""A job on a cluster: made, asked about and stopped. It is known as FORM/NAMESPACE/NAME."""

import json
import logging
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from bundle.errors import ExitCode, LaunchUnavailable
from bundle.launch.job import Job
from bundle.targets.kubernetes import FORMS, client, objects
from bundle.targets.kubernetes.options import Options
from bundle.targets.kubernetes.pod import INSTANCE

_log = logging.getLogger(__name__)

# How often a job is looked at, and for how long the API server may be away meanwhile.
LOOK_SECONDS, PATIENCE_SECONDS = 5.0, 600
# How many pods' logs are streamed at once: each is a connection that the API server holds.
MOST_STREAMS = 16


class State(NamedTuple):
    """What is said of a job: its state, why it is so, its exit code once it has ended."""

    name: str
    reason: str
    code: int | None


def submit(job: Job, options: Options) -> str:
    """Makes the objects of a job; returns what the job is called.

    All of them are tried before one is made, and all but the workload go when that does. Raises
    LaunchUnavailable with everything that the cluster has against them, and where the job runs already.
    """
    options = replace(options, namespace=options.namespace or client.namespace())
    *others, workload = [_plain(each) for each in objects(job, options)]
    name = f"{options.form}/{options.namespace}/{workload['metadata']['name']}"
    _replaceable(name)
    # What lies in no namespace cannot go with the workload; its name says what is in it.
    owned = [each for each in others if "namespace" in each["metadata"]]
    unowned = [each for each in others if each not in owned]
    _refuse(unowned)
    for each in unowned:
        client.make(each)  # else the cluster refuses the workload
    _refuse([*owned, workload])
    made = client.make(workload)
    owner = {key: workload[key] for key in ("apiVersion", "kind")}
    owner |= {"name": workload["metadata"]["name"], "uid": made["metadata"]["uid"]}
    for each in owned:
        client.make(each | {"metadata": each["metadata"] | {"ownerReferences": [owner]}})
    return name


def state(name: str) -> State:
    """What the cluster says of a job. Raises LaunchUnavailable where it knows of none."""
    now = _looked(name)
    if now is None:
        raise LaunchUnavailable(f"kubernetes:{name}: no such job; it was stopped, or its time is over")
    if now.code is not None or now.name != "PENDING":
        return now
    pods = _pods(name)
    if pods and all(pod.status.phase == "Running" for pod in pods):
        return State("RUNNING", now.reason, None)
    conditions = [each for pod in pods for each in pod.status.conditions or () if each.status == "False"]
    waits = next((each.message for each in conditions if each.type == "PodScheduled"), None)
    return State("PENDING", waits or now.reason, None)


def stop(name: str) -> None:
    """Has a job save and end: its pods are told to, and have their time for that; then its objects go."""
    client.delete(*_path(name))


def written(name: str) -> str:
    """All that the pods of a job have written that are still there, one after the other."""
    _, namespace, _ = name.split("/")
    state(name)
    return "".join(client.log(namespace, pod.metadata.name) for pod in _begun(_pods(name)))


def follow(name: str, seconds: float = LOOK_SECONDS) -> Iterator[str]:
    """What the pods of a job write, as it comes, until it has ended; of many, some at a time."""
    _, namespace, _ = name.split("/")
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    streams: dict[str, threading.Thread] = {}
    for _ in _looked_at(name, seconds):
        alive = sum(stream.is_alive() for stream in streams.values())
        new = [pod for pod in _begun(_pods(name)) if pod.metadata.uid not in streams]
        for pod in new[: MOST_STREAMS - alive]:
            stream = threading.Thread(target=_stream, args=(pod.metadata.name, namespace, lines), daemon=True)
            streams[pod.metadata.uid] = stream
            stream.start()
        yield from _drained(lines)
    for stream in streams.values():
        stream.join(client.SECONDS)
    yield from _drained(lines)


def wait(name: str, seconds: float = LOOK_SECONDS) -> int:
    """The exit code of a job, once it has ended: that of the pod that failed first."""
    *_, last = _looked_at(name, seconds)
    assert last.code is not None, "it has ended"
    return last.code


def _looked_at(name: str, seconds: float) -> Iterator[State]:
    """How a job is, every now and then until it has ended; an API server that is away may come back."""
    silent, known = 0.0, False
    while True:
        try:
            now, silent = _looked(name), 0.0
        except LaunchUnavailable as error:
            if not known or silent >= PATIENCE_SECONDS:
                raise
            if not silent:
                _log.warning("%s; asks again for %d s", error, PATIENCE_SECONDS)
            silent += seconds
        else:
            if now is None and not known:
                state(name)  # says that there is none
            known = True
            yield (now := now or State("STOPPED", "its objects are gone", int(ExitCode.TERMINATED)))
            if now.code is not None:
                return
        time.sleep(seconds)


def _looked(name: str) -> State | None:
    """What the workload's own status says; None where there is no such workload."""
    found = client.found(*_path(name))
    if found is None:
        return None
    ended = FORMS[name.partition("/")[0]].ended(found.get("status") or {})
    reason = ended.reason
    if ended.succeeded:
        return State("COMPLETED", "", int(ExitCode.OK))
    if ended.succeeded is False:
        return State("FAILED", reason, _code(_pods(name)) if ended.code is None else ended.code)
    if found["metadata"].get("deletionTimestamp"):
        return State("STOPPING", "its pods save and end", None)
    suspended = (found.get("spec") or {}).get("suspend")
    return State("SUSPENDED" if suspended else "PENDING", reason, None)


def _code(pods: list[Any]) -> int:
    """The code of the pod that failed first; of a job whose pods are gone, that of any failure."""
    ends = [
        (status.state.terminated.finished_at, status.state.terminated.exit_code)
        for pod in pods
        for status in pod.status.container_statuses or ()
        if status.state.terminated is not None and status.state.terminated.exit_code
    ]
    return min(ends)[1] if ends else int(ExitCode.JOB_FAILED)


def _begun(pods: list[Any]) -> list[Any]:
    """The pods that have written, or may have."""
    return [pod for pod in pods if pod.status.phase in ("Running", "Succeeded", "Failed")]


def _pods(name: str) -> list[Any]:
    _, namespace, own = name.split("/")
    return client.pods(namespace, f"{INSTANCE}={own}")


def _stream(pod: str, namespace: str, lines: "queue.SimpleQueue[str]") -> None:
    """Hands on what a pod writes until it ends, or the connection does."""
    try:
        for line in client.stream(namespace, pod):
            lines.put(line)
    except LaunchUnavailable as error:
        _log.warning("%s: %s", pod, error)


def _drained(lines: "queue.SimpleQueue[str]") -> Iterator[str]:
    while not lines.empty():
        yield lines.get()


def _refuse(those: list[dict[str, Any]]) -> None:
    """Raises LaunchUnavailable with all that the cluster has against objects, none of which it makes."""
    if against := [why for each in those if (why := client.against(each))]:
        raise LaunchUnavailable("the cluster does not take the job", against)


def _replaceable(name: str) -> None:
    """Removes the job of that name where it has ended. Raises LaunchUnavailable where it has not."""
    now = _looked(name)
    if now is None:
        return
    if now.code is None:
        raise LaunchUnavailable(
            f"kubernetes:{name} is there, and has not ended: `mcore-bundle launch logs kubernetes:{name}`,"
            " or another --name"
        )
    stop(name)
    for _ in range(client.SECONDS):
        if _looked(name) is None:
            return
        time.sleep(1)
    raise LaunchUnavailable(f"kubernetes:{name}: has ended, and its objects do not go")


def _path(name: str) -> tuple[str, str, str, str]:
    """API, kind, namespace and name of the workload of a job."""
    form, namespace, own = name.split("/")
    return FORMS[form].api, FORMS[form].kind, namespace, own


def _plain(value: Any) -> Any:
    """The value as JSON has it: texts that are nothing more."""
    return json.loads(json.dumps(value))
