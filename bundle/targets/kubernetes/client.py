"""The API server of a cluster, as much of it as is asked, through the official Python client.

The client is an extra (`kubernetes`) and is imported by whoever asks, which takes it a second. The cluster is
that of the current context of kubectl's configuration, or the one that this runs in.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from bundle import files
from bundle.errors import LaunchUnavailable
from bundle.targets.kubernetes.pod import INSTANCE, is_of

# That one answer may take; that a stream may be silent before it counts as cut.
SECONDS, SILENT_SECONDS = 60, 300
_CORE = {"ConfigMap": "config_map", "Service": "service"}  # Kubernetes' own kinds, as the client spells them
_STRICT: dict[str, Any] = {"field_validation": "Strict"}
_WITHIN: dict[str, Any] = {"_request_timeout": SECONDS}
_MERGE: dict[str, Any] = {"_content_type": "application/merge-patch+json"}
_TRIES = 3  # at what somebody else, such as the collector of garbage, changes at the same time
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")  # of a pod that this runs in


class NoAnswer(LaunchUnavailable):
    """No API server has answered: nobody knows whether it did what it was asked."""


class _Cluster(NamedTuple):
    """The client's halves, and the namespace of the current context."""

    core: Any
    custom: Any
    # That asks nothing twice: what was asked of the last so many seconds is of others then.
    streams: Any
    namespace: str


def found(each: Mapping[str, Any]) -> dict[str, Any] | None:
    """An object as the cluster has it, by its kind and name; None where there is none."""
    with _answers():
        from kubernetes.client.exceptions import NotFoundException

        try:
            return dict(_asked("get", each))
        except NotFoundException:
            return None


def delete(there: Mapping[str, Any], *, unchanged: bool = False) -> None:
    """Has an object that was found go when all that it owns has gone.

    Not one that took its name since; where it must be `unchanged`, not one that somebody has written to.
    """
    keys = ("uid", "resourceVersion") if unchanged else ("uid",)
    conditions = {key: there["metadata"][key] for key in keys}
    only = {"preconditions": conditions, "propagationPolicy": "Foreground"}
    with _answers():
        _asked("delete", there, body=only)


def pods(namespace: str, label: str) -> list[Any]:
    """The pods that have a label, by their names, the first node's first."""
    with _answers():
        listed = _cluster().core.list_namespaced_pod(namespace, label_selector=label, **_WITHIN)
    return sorted(listed.items, key=lambda pod: (len(pod.metadata.name), pod.metadata.name))


def log(namespace: str, pod: str) -> str:
    """All that a pod has written."""
    with _answers():
        return str(_cluster().core.read_namespaced_pod_log(pod, namespace, **_WITHIN))


def stream(namespace: str, pod: str, since: int | None = None) -> Iterator[str]:
    """The lines that a pod writes, each behind its time, until the pod ends or the server ends the stream.

    `since`: of the last so many seconds. Raises NoAnswer where the connection is lost, or silent for long.
    """
    how: dict[str, Any] = {} if since is None else {"since_seconds": since}
    how |= {"_preload_content": False, "_request_timeout": (SECONDS, SILENT_SECONDS)}
    with _answers():
        read = _cluster().streams.read_namespaced_pod_log
        for line in read(pod, namespace, follow=True, timestamps=True, **how):
            yield line.decode("utf-8", errors="replace")


def namespace() -> str:
    """The namespace of the current context."""
    return _cluster().namespace


def against(each: dict[str, Any]) -> str | None:
    """What the cluster has against an object, if anything; it is not made.

    One of the same job that is there already is nothing against it.
    """
    _cluster()
    from kubernetes.client.exceptions import ApiException, ConflictException, NotFoundException

    metadata = each["metadata"]
    try:
        with _connected():
            _asked("create", each, dry_run="All", **_STRICT)
    except ConflictException:
        there = found(each)
        if there is not None and not is_of(there, metadata["labels"][INSTANCE]):
            return f"{each['kind']} {metadata['name']}: is there, and not of this job: take another --name"
    except NotFoundException:
        return f"{each['kind']} of {each['apiVersion']}: is not installed there"
    except ApiException as error:
        return f"{each['kind']}: {_said(error)}"
    return None


def make(each: dict[str, Any]) -> dict[str, Any] | None:
    """Makes an object, and returns it as the cluster has it; None where it is there already."""
    with _answers():
        from kubernetes.client.exceptions import ConflictException

        try:
            return dict(_asked("create", each, **_STRICT))
        except ConflictException:
            return None


def own(each: dict[str, Any], owner: Mapping[str, Any]) -> None:
    """Has an object of a job go with its owner, or with the last of several; makes it where it has gone.

    An owner of that name that was there before is none any more.
    """
    with _answers():
        from kubernetes.client.exceptions import ConflictException, NotFoundException

        for _ in range(_TRIES):
            there = found(each)
            try:
                if there is None:
                    owned = each | {"metadata": each["metadata"] | {"ownerReferences": [owner]}}
                    _asked("create", owned, **_STRICT)
                    return
                if not is_of(there, each["metadata"]["labels"][INSTANCE]):
                    break
                metadata = there["metadata"]
                others = [
                    other
                    for other in metadata.get("ownerReferences") or ()
                    if (other["kind"], other["name"]) != (owner["kind"], owner["name"])
                ]
                # Refused where it was changed since it was found.
                changed = {
                    "resourceVersion": metadata.get("resourceVersion"),
                    "ownerReferences": [*others, owner],
                }
                _asked("patch", each, {"metadata": changed}, **_MERGE)
                return
            except (ConflictException, NotFoundException):
                continue
    raise LaunchUnavailable(f"{each['kind']} {each['metadata']['name']}: somebody else changes it")


def _asked(verb: str, each: Mapping[str, Any], *content: Any, **how: Any) -> Any:
    """What the cluster answers to one of create, get, patch and delete of an object, as plain data."""
    cluster, kind, metadata = _cluster(), each["kind"], each["metadata"]
    namespace = metadata.get("namespace")
    named = [] if verb == "create" else [metadata["name"]]
    content = (each,) if verb == "create" else content
    if kind in _CORE:
        ask = getattr(cluster.core, f"{'read' if verb == 'get' else verb}_namespaced_{_CORE[kind]}")
        answer = ask(*named, namespace, *content, **how, **_WITHIN)
    else:
        group, _, version = each["apiVersion"].partition("/")
        scope, within = ("cluster", []) if namespace is None else ("namespaced", [namespace])
        ask = getattr(cluster.custom, f"{verb}_{scope}_custom_object")
        answer = ask(group, version, *within, _plural(kind), *named, *content, **how, **_WITHIN)
    return cluster.core.api_client.sanitize_for_serialization(answer)


def _plural(kind: str) -> str:
    return f"{kind.lower()}s"


@contextmanager
def _answers() -> Iterator[None]:
    """Raises what an API server has against a question as LaunchUnavailable, and where none answers."""
    _cluster()
    from kubernetes.client.exceptions import ApiException

    try:
        with _connected():
            yield
    except ApiException as error:
        raise LaunchUnavailable(f"the cluster refuses: {_said(error)}") from error


@contextmanager
def _connected() -> Iterator[None]:
    """Raises NoAnswer where no API server answers."""
    from urllib3.exceptions import HTTPError

    try:
        yield
    except HTTPError as error:
        raise NoAnswer(f"no API server answers: {files.printable(str(error))[:300]}") from error


def _said(error: Any) -> str:
    """What an API server says in an answer that is none of success."""
    try:
        said = json.loads(error.body)["message"]
    except (ValueError, TypeError, KeyError):
        said = f"{error.status} {error.reason}"
    return files.printable(str(said))[:2000]


@cache
def _cluster() -> _Cluster:
    """The cluster of the current context. Raises LaunchUnavailable where there is none, or no client."""
    try:
        from kubernetes import client, config
    except ImportError:
        raise LaunchUnavailable(
            "the client of Kubernetes is not installed: pip install 'mcore-bundle[kubernetes]'"
        ) from None
    named = os.environ.get("KUBECONFIG") or None
    try:
        config.load_kube_config(config_file=named)
        _, context = config.list_kube_config_contexts(config_file=named)
        namespace = context["context"].get("namespace")
    except config.ConfigException as error:
        try:
            config.load_incluster_config()
        except config.ConfigException:
            raise LaunchUnavailable(f"no cluster is configured: {files.printable(str(error))}") from error
        namespace = files.read(_NAMESPACE)
    once = client.Configuration.get_default_copy()
    once.retries = False
    streams = client.CoreV1Api(client.ApiClient(once))
    return _Cluster(client.CoreV1Api(), client.CustomObjectsApi(), streams, namespace or "default")
