"""A job on a cluster: made, asked about and stopped. It is known as FORM/NAMESPACE/NAME.

What has not the labels of that very job is read, and never changed.
"""

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from bundle.errors import ExitCode, LaunchUnavailable
from bundle.launch.job import Job
from bundle.targets.kubernetes import FORMS, client, objects
from bundle.targets.kubernetes.logs import Streams
from bundle.targets.kubernetes.options import Options
from bundle.targets.kubernetes.pod import INSTANCE, is_of

_log = logging.getLogger(__name__)

# How often a job is looked at, and for how long the API server may be away meanwhile.
LOOK_SECONDS, PATIENCE_SECONDS = 5.0, 600


class _Unknown(LaunchUnavailable):
    """Whether the workload was made is not known: what it needs must stay."""


class State(NamedTuple):
    """What is said of a job: its state, why it is so, its exit code once it has ended."""

    name: str
    reason: str
    code: int | None


def submit(job: Job, options: Options) -> str:
    """Makes the objects of a job; returns what the job is called.

    All of them are tried before one is made; what pods need is made before the workload, goes with it, and
    at once where the workload is not made. Raises LaunchUnavailable with everything that the cluster has
    against them, and where the job runs already.
    """
    options = replace(options, namespace=options.namespace or client.namespace())
    *others, workload = [_plain(each) for each in objects(job, options)]
    name = f"{options.form}/{options.namespace}/{workload['metadata']['name']}"
    _replaceable(name)
    # What lies in no namespace cannot go with the workload; its name says what is in it.
    owned = [each for each in others if "namespace" in each["metadata"]]
    unowned = [each for each in others if each not in owned]
    new: list[dict[str, Any]] = []
    try:
        _refuse(unowned)
        _make(unowned, new)  # else the cluster refuses the workload
        _refuse([*owned, workload])
        _make(owned, new)
        made = _hand_over(workload, name)
    except LaunchUnavailable as error:
        if not isinstance(error, _Unknown):
            _take_back(new)
        raise
    owner = {key: workload[key] for key in ("apiVersion", "kind")}
    owner |= {"name": workload["metadata"]["name"], "uid": made["metadata"]["uid"]}
    for each in owned:
        try:
            client.own(each, owner)
        except LaunchUnavailable as error:
            _log.warning("%s: %s stays when the job has gone: %s", name, _spoken(each), error)
    return name


def state(name: str) -> State:
    """What the cluster says of a job. Raises LaunchUnavailable where it knows of none."""
    now = _looked(name)
    if now is None:
        raise LaunchUnavailable(f"kubernetes:{name}: no such job; it was stopped, or its time is over")
    if now.code is not None or now.name != "PENDING":
        return now
    # A pod that had to go stays listed beside the one that came for it.
    pods = [pod for pod in _pods(name) if pod.status.phase not in ("Succeeded", "Failed")]
    if pods and all(pod.status.phase == "Running" for pod in pods):
        return State("RUNNING", now.reason, None)
    conditions = [each for pod in pods for each in pod.status.conditions or () if each.status == "False"]
    waits = next((each.message for each in conditions if each.type == "PodScheduled"), None)
    return State("PENDING", waits or now.reason, None)


def stop(name: str) -> None:
    """Has a job save and end: its pods are told to, and have their time for that; then its objects go."""
    there = client.found(_workload(name))
    if there is None:
        state(name)  # says that there is none
    else:
        _is_ours(there, name)
        client.delete(there)


def written(name: str) -> str:
    """All that the pods of a job have written that are still there, one after the other."""
    _, namespace, _ = name.split("/")
    state(name)
    return "".join(client.log(namespace, pod.metadata.name) for pod in _begun(_pods(name)))


def follow(name: str, seconds: float = LOOK_SECONDS) -> Iterator[str]:
    """What the pods of a job write, as it comes, until it has ended; of many, some at a time."""
    streams = Streams(name.split("/")[1])
    for _ in _looked_at(name, seconds):
        streams.open(_writing(name))
        yield from streams.lines()
    pods, deadline = _writing(name), time.monotonic() + client.SECONDS
    while streams.open(pods, last=True) and time.monotonic() < deadline:
        yield from streams.lines()
        time.sleep(min(seconds, 0.1))
    yield from streams.lines()


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
    found = client.found(_workload(name))
    return None if found is None else _how(name, found)


def _how(name: str, found: dict[str, Any]) -> State:
    """How a job is whose workload was found."""
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


def _begun(pods: list[Any]) -> list[Any]:
    """The pods that have written, or may have."""
    return [pod for pod in pods if pod.status.phase in ("Running", "Succeeded", "Failed")]


def _pods(name: str) -> list[Any]:
    _, namespace, own = name.split("/")
    return client.pods(namespace, f"{INSTANCE}={own}")


def _writing(name: str) -> list[Any]:
    """The pods that write; none where no API server answers: whoever looks at the job notices."""
    try:
        return _begun(_pods(name))
    except client.NoAnswer:
        return []


def _refuse(those: list[dict[str, Any]]) -> None:
    """Raises LaunchUnavailable with all that the cluster has against objects, none of which it makes."""
    if against := [why for each in those if (why := client.against(each))]:
        raise LaunchUnavailable("the cluster does not take the job", against)


def _make(those: list[dict[str, Any]], new: list[dict[str, Any]]) -> None:
    """Makes objects, where they are not there already, and adds to `new` what was made."""
    for each in those:
        if made := client.make(each):
            new.append(each | {"metadata": made["metadata"]})


def _hand_over(workload: dict[str, Any], name: str) -> dict[str, Any]:
    """Makes the workload, and returns it. Raises LaunchUnavailable; _Unknown where it may have been made."""
    try:
        made = client.make(workload)
    except client.NoAnswer as error:
        try:
            made = client.found(workload)  # the answer was lost, or the question
        except LaunchUnavailable:
            status = f"`mcore-bundle launch status kubernetes:{name}` says whether it was made"
            raise _Unknown(f"{error}; {status}, and the same command makes it if not") from error
        if made is None:
            raise
    if made is None:
        raise LaunchUnavailable(f"kubernetes:{name}: somebody else has made it at the same time")
    return made


def _take_back(new: list[dict[str, Any]]) -> None:
    """Removes what was made for a workload that is not."""
    for each in reversed(new):
        try:
            client.delete(each, unchanged=True)
        except LaunchUnavailable as error:
            _log.warning("%s is left: %s", _spoken(each), error)


def _replaceable(name: str) -> None:
    """Removes the job of that name where it has ended. Raises LaunchUnavailable where it has not."""
    there = client.found(_workload(name))
    if there is None:
        return
    _is_ours(there, name)
    if _how(name, there).code is None:
        raise LaunchUnavailable(
            f"kubernetes:{name} is there, and has not ended: `mcore-bundle launch logs kubernetes:{name}`,"
            " or another --name"
        )
    client.delete(there)
    for _ in range(client.SECONDS):
        if client.found(there) is None:
            return
        time.sleep(1)
    raise LaunchUnavailable(f"kubernetes:{name}: has ended, and its objects do not go")


def _is_ours(there: dict[str, Any], name: str) -> None:
    """Raises LaunchUnavailable for a workload that was not made by us."""
    if not is_of(there, there["metadata"]["name"]):
        raise LaunchUnavailable(f"kubernetes:{name}: was not made by mcore-bundle, and is left as it is")


def _workload(name: str) -> dict[str, Any]:
    """The workload of a job, as far as its name says it."""
    form, namespace, own = name.split("/")
    metadata = {"namespace": namespace, "name": own}
    return {"apiVersion": FORMS[form].api, "kind": FORMS[form].kind, "metadata": metadata}


def _spoken(each: dict[str, Any]) -> str:
    return f"{each['kind']} {each['metadata']['name']}"


def _plain(value: Any) -> Any:
    """The value as JSON has it: texts that are nothing more."""
    return json.loads(json.dumps(value))
