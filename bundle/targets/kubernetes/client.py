"""The requests to a cluster's API server, through the official Python client.

The client is an extra (`kubernetes`). It is imported at the first request, which takes about 1 s. The cluster
is that of the current context of kubectl's configuration, or else the cluster in which this process runs.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from bundle import files
from bundle.errors import TargetUnavailable
from bundle.targets.client import CLIENT_IMPORT_THREAD_LOCK
from bundle.targets.kubernetes.pod import INSTANCE_LABEL, MANAGED_OBJECTS_SELECTOR, is_from_job
from bundle.targets.states import TargetNotConfigured

# The longest time for one answer; the longest silence of a stream before it counts as cut.
TIMEOUT_SECONDS, SILENT_SECONDS = 60, 300
_CORE_API_METHOD_SUFFIXES = {
    "ConfigMap": "config_map",
    "Service": "service",
}  # Kubernetes' own kinds, as the client spells them
_STRICT_VALIDATION: dict[str, Any] = {"field_validation": "Strict"}
_TIMEOUT_ARGUMENTS: dict[str, Any] = {"_request_timeout": TIMEOUT_SECONDS}
_MERGE_PATCH: dict[str, Any] = {"_content_type": "application/merge-patch+json"}
_CHANGE_ATTEMPTS = 3  # attempts to change an object that, for example, the garbage collector also changes
_NAMESPACE_FILE = Path(
    "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
)  # the pod of this process, if any


class ServerUnreachable(TargetUnavailable):
    """The error that no API server has answered: it is unknown whether the request was carried out."""


class _Cluster(NamedTuple):
    """The parts of the client, and the namespace of the current context."""

    core: Any
    custom: Any
    # This client never retries: a later request for "the last N seconds" would get other lines.
    streams: Any
    namespace: str


def find_object(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return an object of the cluster with this kind and name; None where there is none."""
    with _translate_errors():
        from kubernetes.client.exceptions import NotFoundException

        try:
            return dict(_call_api("get", manifest))
        except NotFoundException:
            return None


def delete(existing: Mapping[str, Any], *, unchanged: bool = False) -> None:
    """Delete an object that was found, after everything that it owns is deleted.

    An object that took its name since is not deleted. With `unchanged`, nor is an object that was written to
    since.
    """
    keys = ("uid", "resourceVersion") if unchanged else ("uid",)
    conditions = {key: existing["metadata"][key] for key in keys}
    delete_options = {"preconditions": conditions, "propagationPolicy": "Foreground"}
    with _translate_errors():
        _call_api("delete", existing, body=delete_options)


def list_managed_workloads(api: str, kind: str, namespace: str) -> list[dict[str, Any]]:
    """Return the objects of a kind that mcore-bundle created; none where the cluster lacks the kind."""
    group, _, version = api.partition("/")
    with _translate_errors():
        from kubernetes.client.exceptions import NotFoundException

        try:
            listed = _connect().custom.list_namespaced_custom_object(
                group,
                version,
                namespace,
                _to_plural(kind),
                label_selector=MANAGED_OBJECTS_SELECTOR,
                **_TIMEOUT_ARGUMENTS,
            )
        except NotFoundException:
            return []
    return [{"apiVersion": api, "kind": kind} | item for item in listed["items"]]


def list_pods(namespace: str, label: str) -> list[Any]:
    """Return the pods that have a label, sorted by name, the first node's first."""
    with _translate_errors():
        listed = _connect().core.list_namespaced_pod(namespace, label_selector=label, **_TIMEOUT_ARGUMENTS)
    return sorted(listed.items, key=lambda pod: (len(pod.metadata.name), pod.metadata.name))


def read_log(namespace: str, pod: str) -> str:
    """Return everything that a pod has written."""
    with _translate_errors():
        return str(_connect().core.read_namespaced_pod_log(pod, namespace, **_TIMEOUT_ARGUMENTS))


def stream_timestamped_log(namespace: str, pod: str, since_seconds: int | None = None) -> Iterator[str]:
    """Yield the lines of a pod, each after its time, until the pod or the stream ends.

    With `since_seconds`, only lines of the last `since_seconds` seconds. Raise ServerUnreachable where the
    connection is lost, or silent for `SILENT_SECONDS`.
    """
    arguments: dict[str, Any] = {} if since_seconds is None else {"since_seconds": since_seconds}
    arguments |= {"_preload_content": False, "_request_timeout": (TIMEOUT_SECONDS, SILENT_SECONDS)}
    with _translate_errors():
        read = _connect().streams.read_namespaced_pod_log
        for line in read(pod, namespace, follow=True, timestamps=True, **arguments):
            yield line.decode("utf-8", errors="replace")


def get_namespace() -> str:
    """Return the namespace of the current context."""
    return _connect().namespace


def find_objection(manifest: dict[str, Any]) -> str | None:
    """Return the reason why the cluster would refuse an object, or None; nothing is created.

    An existing object of the same job is not a reason.
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
            return f"{manifest['kind']} {metadata['name']}: belongs to another job. Choose another --name"
    except NotFoundException:
        kind = f"{manifest['kind']} of {manifest['apiVersion']}"
        return (
            f"{kind}: the cluster answers Not Found: the type is not installed, or the namespace is missing"
        )
    except ApiException as error:
        return f"{manifest['kind']}: {_read_error(error)}"
    return None


def create_if_absent(manifest: dict[str, Any]) -> dict[str, Any] | None:
    """Create an object and return it as the cluster has it; None where it exists already."""
    with _translate_errors():
        from kubernetes.client.exceptions import ConflictException

        try:
            return dict(_call_api("create", manifest, **_STRICT_VALIDATION))
        except ConflictException:
            return None


def create_or_patch_with_owner(manifest: dict[str, Any], owner: Mapping[str, Any]) -> None:
    """Set the owner of an object of a job, and create the object where it is gone.

    The cluster deletes the object with its owner, or with the last of several owners. An older owner with the
    same kind and name is replaced. Raise TargetUnavailable where another process keeps changing the object.
    """
    with _translate_errors():
        from kubernetes.client.exceptions import ConflictException, NotFoundException

        for _ in range(_CHANGE_ATTEMPTS):
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
                # The server refuses the patch where the object has changed since it was read.
                changed = {
                    "resourceVersion": metadata.get("resourceVersion"),
                    "ownerReferences": [*other_owners, owner],
                }
                _call_api("patch", manifest, {"metadata": changed}, **_MERGE_PATCH)
                return
            except (ConflictException, NotFoundException):
                continue
    raise TargetUnavailable(f"{manifest['kind']} {manifest['metadata']['name']}: another client changes it")


def _call_api(verb: str, manifest: Mapping[str, Any], *content: Any, **arguments: Any) -> Any:
    """Return the cluster's answer to a create, get, patch or delete of an object, as plain data."""
    cluster, kind, metadata = _connect(), manifest["kind"], manifest["metadata"]
    namespace = metadata.get("namespace")
    names = [] if verb == "create" else [metadata["name"]]
    content = (manifest,) if verb == "create" else content
    if kind in _CORE_API_METHOD_SUFFIXES:
        call = getattr(
            cluster.core, f"{'read' if verb == 'get' else verb}_namespaced_{_CORE_API_METHOD_SUFFIXES[kind]}"
        )
        answer = call(*names, namespace, *content, **arguments, **_TIMEOUT_ARGUMENTS)
    else:
        group, _, version = manifest["apiVersion"].partition("/")
        scope, namespaces = ("cluster", []) if namespace is None else ("namespaced", [namespace])
        call = getattr(cluster.custom, f"{verb}_{scope}_custom_object")
        answer = call(
            group, version, *namespaces, _to_plural(kind), *names, *content, **arguments, **_TIMEOUT_ARGUMENTS
        )
    return cluster.core.api_client.sanitize_for_serialization(answer)


def _to_plural(kind: str) -> str:
    return f"{kind.lower()}s"


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Raise TargetUnavailable for an API server's refusal, and ServerUnreachable where none answers."""
    _connect()
    from kubernetes.client.exceptions import ApiException

    try:
        with _translate_connection_errors():
            yield
    except ApiException as error:
        raise TargetUnavailable(f"the cluster refuses: {_read_error(error)}") from error


@contextmanager
def _translate_connection_errors() -> Iterator[None]:
    """Raise ServerUnreachable where no API server answers."""
    from urllib3.exceptions import HTTPError

    try:
        yield
    except HTTPError as error:
        raise ServerUnreachable(f"no API server answers: {files.to_printable(str(error))[:300]}") from error


def _read_error(error: Any) -> str:
    """Return the message in an API server's error response."""
    try:
        message = json.loads(error.body)["message"]
    except (ValueError, TypeError, KeyError):
        message = f"{error.status} {error.reason}"
    return files.to_printable(str(message))[:2000]


@cache
def _connect() -> _Cluster:
    """Return the cluster of the current context.

    Raise TargetNotConfigured where no cluster is configured, or the client is not installed.
    """
    try:
        with CLIENT_IMPORT_THREAD_LOCK:
            from kubernetes import client, config
    except ImportError:
        raise TargetNotConfigured(
            "the Kubernetes client is not installed: pip install 'mcore-bundle[kubernetes]'"
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
            message = f"no cluster is configured: {files.to_printable(str(error))}"
            raise TargetNotConfigured(message) from error
        namespace = files.read_text_if_small(_NAMESPACE_FILE)
    configuration = client.Configuration.get_default_copy()
    configuration.retries = False
    streams = client.CoreV1Api(client.ApiClient(configuration))
    return _Cluster(client.CoreV1Api(), client.CustomObjectsApi(), streams, namespace or "default")
