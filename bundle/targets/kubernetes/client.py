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
from bundle.targets.kubernetes.pod import INSTANCE_LABEL, is_from_job

# That one answer may take; that a stream may be silent before it counts as cut.
TIMEOUT_SECONDS, SILENT_SECONDS = 60, 300
_CORE_KINDS = {
    "ConfigMap": "config_map",
    "Service": "service",
}  # Kubernetes' own kinds, as the client spells them
_STRICT_VALIDATION: dict[str, Any] = {"field_validation": "Strict"}
_TIMEOUT: dict[str, Any] = {"_request_timeout": TIMEOUT_SECONDS}
_MERGE_PATCH: dict[str, Any] = {"_content_type": "application/merge-patch+json"}
_TRIES = 3  # at what somebody else, such as the collector of garbage, changes at the same time
_NAMESPACE_FILE = Path(
    "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
)  # of a pod that this runs in


class ServerUnreachable(LaunchUnavailable):
    """No API server has answered: nobody knows whether it did what it was asked."""


class _Cluster(NamedTuple):
    """The client's halves, and the namespace of the current context."""

    core: Any
    custom: Any
    # That asks nothing twice: what was asked of the last so many seconds is of others then.
    streams: Any
    namespace: str


def find_object(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """An object as the cluster has it, by its kind and name; None where there is none."""
    with _translate_errors():
        from kubernetes.client.exceptions import NotFoundException

        try:
            return dict(_call_api("get", manifest))
        except NotFoundException:
            return None


def delete(existing: Mapping[str, Any], *, unchanged: bool = False) -> None:
    """Has an object that was found go when all that it owns has gone.

    Not one that took its name since; where it must be `unchanged`, not one that somebody has written to.
    """
    keys = ("uid", "resourceVersion") if unchanged else ("uid",)
    conditions = {key: existing["metadata"][key] for key in keys}
    delete_options = {"preconditions": conditions, "propagationPolicy": "Foreground"}
    with _translate_errors():
        _call_api("delete", existing, body=delete_options)


def list_pods(namespace: str, label: str) -> list[Any]:
    """The pods that have a label, by their names, the first node's first."""
    with _translate_errors():
        listed = _connect().core.list_namespaced_pod(namespace, label_selector=label, **_TIMEOUT)
    return sorted(listed.items, key=lambda pod: (len(pod.metadata.name), pod.metadata.name))


def read_log(namespace: str, pod: str) -> str:
    """All that a pod has written."""
    with _translate_errors():
        return str(_connect().core.read_namespaced_pod_log(pod, namespace, **_TIMEOUT))


def stream_log(namespace: str, pod: str, since_seconds: int | None = None) -> Iterator[str]:
    """The lines that a pod writes, each behind its time, until the pod ends or the server ends the stream.

    `since_seconds`: of the last so many seconds. Raises NoAnswer where the connection is lost, or silent for
    long.
    """
    arguments: dict[str, Any] = {} if since_seconds is None else {"since_seconds": since_seconds}
    arguments |= {"_preload_content": False, "_request_timeout": (TIMEOUT_SECONDS, SILENT_SECONDS)}
    with _translate_errors():
        read = _connect().streams.read_namespaced_pod_log
        for line in read(pod, namespace, follow=True, timestamps=True, **arguments):
            yield line.decode("utf-8", errors="replace")


def get_namespace() -> str:
    """The namespace of the current context."""
    return _connect().namespace


def find_objection(manifest: dict[str, Any]) -> str | None:
    """What the cluster has against an object, if anything; it is not made.

    One of the same job that is there already is nothing against it.
    """
    _connect()
    from kubernetes.client.exceptions import ApiException, ConflictException, NotFoundException

    metadata = manifest["metadata"]
    try:
        with _translate_connection_errors():
            _call_api("create", manifest, dry_run="All", **_STRICT_VALIDATION)
    except ConflictException:
        existing = find_object(manifest)
        if existing is not None and not is_from_job(existing, metadata["labels"][INSTANCE_LABEL]):
            return (
                f"{manifest['kind']} {metadata['name']}: is there, and not of this job: take another --name"
            )
    except NotFoundException:
        return f"{manifest['kind']} of {manifest['apiVersion']}: is not installed there"
    except ApiException as error:
        return f"{manifest['kind']}: {_read_error(error)}"
    return None


def make(manifest: dict[str, Any]) -> dict[str, Any] | None:
    """Makes an object, and returns it as the cluster has it; None where it is there already."""
    with _translate_errors():
        from kubernetes.client.exceptions import ConflictException

        try:
            return dict(_call_api("create", manifest, **_STRICT_VALIDATION))
        except ConflictException:
            return None


def set_owner(manifest: dict[str, Any], owner: Mapping[str, Any]) -> None:
    """Has an object of a job go with its owner, or with the last of several; makes it where it has gone.

    An owner of that name that was there before is none any more.
    """
    with _translate_errors():
        from kubernetes.client.exceptions import ConflictException, NotFoundException

        for _ in range(_TRIES):
            existing = find_object(manifest)
            try:
                if existing is None:
                    owned = manifest | {"metadata": manifest["metadata"] | {"ownerReferences": [owner]}}
                    _call_api("create", owned, **_STRICT_VALIDATION)
                    return
                if not is_from_job(existing, manifest["metadata"]["labels"][INSTANCE_LABEL]):
                    break
                metadata = existing["metadata"]
                other_owners = [
                    other
                    for other in metadata.get("ownerReferences") or ()
                    if (other["kind"], other["name"]) != (owner["kind"], owner["name"])
                ]
                # Refused where it was changed since it was found.
                changed = {
                    "resourceVersion": metadata.get("resourceVersion"),
                    "ownerReferences": [*other_owners, owner],
                }
                _call_api("patch", manifest, {"metadata": changed}, **_MERGE_PATCH)
                return
            except (ConflictException, NotFoundException):
                continue
    raise LaunchUnavailable(f"{manifest['kind']} {manifest['metadata']['name']}: somebody else changes it")


def _call_api(verb: str, manifest: Mapping[str, Any], *content: Any, **arguments: Any) -> Any:
    """What the cluster answers to one of create, get, patch and delete of an object, as plain data."""
    cluster, kind, metadata = _connect(), manifest["kind"], manifest["metadata"]
    namespace = metadata.get("namespace")
    names = [] if verb == "create" else [metadata["name"]]
    content = (manifest,) if verb == "create" else content
    if kind in _CORE_KINDS:
        call = getattr(cluster.core, f"{'read' if verb == 'get' else verb}_namespaced_{_CORE_KINDS[kind]}")
        answer = call(*names, namespace, *content, **arguments, **_TIMEOUT)
    else:
        group, _, version = manifest["apiVersion"].partition("/")
        scope, namespaces = ("cluster", []) if namespace is None else ("namespaced", [namespace])
        call = getattr(cluster.custom, f"{verb}_{scope}_custom_object")
        answer = call(
            group, version, *namespaces, _to_plural(kind), *names, *content, **arguments, **_TIMEOUT
        )
    return cluster.core.api_client.sanitize_for_serialization(answer)


def _to_plural(kind: str) -> str:
    return f"{kind.lower()}s"


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Raises what an API server has against a question as LaunchUnavailable, and where none answers."""
    _connect()
    from kubernetes.client.exceptions import ApiException

    try:
        with _translate_connection_errors():
            yield
    except ApiException as error:
        raise LaunchUnavailable(f"the cluster refuses: {_read_error(error)}") from error


@contextmanager
def _translate_connection_errors() -> Iterator[None]:
    """Raises NoAnswer where no API server answers."""
    from urllib3.exceptions import HTTPError

    try:
        yield
    except HTTPError as error:
        raise ServerUnreachable(f"no API server answers: {files.to_printable(str(error))[:300]}") from error


def _read_error(error: Any) -> str:
    """What an API server says in an answer that is none of success."""
    try:
        message = json.loads(error.body)["message"]
    except (ValueError, TypeError, KeyError):
        message = f"{error.status} {error.reason}"
    return files.to_printable(str(message))[:2000]


@cache
def _connect() -> _Cluster:
    """The cluster of the current context. Raises LaunchUnavailable where there is none, or no client."""
    try:
        from kubernetes import client, config
    except ImportError:
        raise LaunchUnavailable(
            "the client of Kubernetes is not installed: pip install 'mcore-bundle[kubernetes]'"
        ) from None
    config_file = os.environ.get("KUBECONFIG") or None
    try:
        config.load_kube_config(config_file=config_file)
        _, context = config.list_kube_config_contexts(config_file=config_file)
        namespace = context["context"].get("namespace")
    except config.ConfigException as error:
        try:
            config.load_incluster_config()
        except config.ConfigException:
            raise LaunchUnavailable(f"no cluster is configured: {files.to_printable(str(error))}") from error
        namespace = files.read_text(_NAMESPACE_FILE)
    configuration = client.Configuration.get_default_copy()
    configuration.retries = False
    streams = client.CoreV1Api(client.ApiClient(configuration))
    return _Cluster(client.CoreV1Api(), client.CustomObjectsApi(), streams, namespace or "default")
