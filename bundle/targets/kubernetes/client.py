"""The API server of a cluster, as much of it as is asked, through the official Python client.

The client is an extra (`kubernetes`) and is imported by whoever asks, which takes it a second. The cluster is
that of the current context of kubectl's configuration, or the one that this runs in.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from bundle import files
from bundle.errors import LaunchUnavailable

SECONDS = 60  # that one answer may take
_CORE = {"ConfigMap": "config_map", "Service": "service"}  # Kubernetes' own kinds, as the client spells them
_STRICT: dict[str, Any] = {"field_validation": "Strict"}
_WITHIN: dict[str, Any] = {"_request_timeout": SECONDS}
_MERGE: dict[str, Any] = {"_content_type": "application/merge-patch+json"}
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")  # of a pod that this runs in


class _Cluster(NamedTuple):
    """The client's halves, and the namespace of the current context."""

    core: Any
    custom: Any
    namespace: str


def found(api: str, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
    """A custom resource, or a Job; None where there is none."""
    with _answers():
        from kubernetes.client.exceptions import NotFoundException

        path = _path(api, kind, namespace)
        try:
            return dict(_cluster().custom.get_namespaced_custom_object(*path, name, **_WITHIN))
        except NotFoundException:
            return None


def delete(api: str, kind: str, namespace: str, name: str) -> None:
    """Has an object go when all that it owns has gone."""
    with _answers():
        path = _path(api, kind, namespace)
        _cluster().custom.delete_namespaced_custom_object(
            *path, name, propagation_policy="Foreground", **_WITHIN
        )


def pods(namespace: str, label: str) -> list[Any]:
    """The pods that have a label, by their names, the first node's first."""
    with _answers():
        listed = _cluster().core.list_namespaced_pod(namespace, label_selector=label, **_WITHIN)
    return sorted(listed.items, key=lambda pod: (len(pod.metadata.name), pod.metadata.name))


def log(namespace: str, pod: str) -> str:
    """All that a pod has written."""
    with _answers():
        return str(_cluster().core.read_namespaced_pod_log(pod, namespace, **_WITHIN))


def stream(namespace: str, pod: str) -> Iterator[str]:
    """What a pod writes, until it ends or the connection does."""
    with _answers():
        read = _cluster().core.read_namespaced_pod_log
        for line in read(pod, namespace, follow=True, _preload_content=False):
            yield line.decode("utf-8", errors="replace")


def namespace() -> str:
    """The namespace of the current context."""
    return _cluster().namespace


def against(each: dict[str, Any]) -> str | None:
    """What the cluster has against an object that it has not got, if anything; it is not made."""
    _cluster()
    from kubernetes.client.exceptions import ApiException, ConflictException, NotFoundException

    try:
        with _connected():
            _create(each, dry_run="All")
    except ConflictException:
        return None
    except NotFoundException:
        return f"{each['kind']} of {each['apiVersion']}: is not installed there"
    except ApiException as error:
        return f"{each['kind']}: {_said(error)}"
    return None


def make(each: dict[str, Any]) -> Any:
    """Makes an object; one of Kubernetes' own that is there already gets the owner of this one."""
    with _answers():
        from kubernetes.client.exceptions import ConflictException

        try:
            return _create(each)
        except ConflictException:
            metadata = each["metadata"]
            if each["kind"] in _CORE:
                patch = getattr(_cluster().core, f"patch_namespaced_{_CORE[each['kind']]}")
                owners = {"metadata": {"ownerReferences": metadata["ownerReferences"]}}
                return patch(metadata["name"], metadata["namespace"], owners, **_MERGE, **_WITHIN)
            if "namespace" not in metadata:
                return None
            raise


def _create(each: dict[str, Any], **how: Any) -> Any:
    how |= _STRICT | _WITHIN
    namespace = each["metadata"].get("namespace")
    if each["kind"] in _CORE:
        create = getattr(_cluster().core, f"create_namespaced_{_CORE[each['kind']]}")
        return create(namespace, each, **how)
    group, _, version = each["apiVersion"].partition("/")
    custom, plural = _cluster().custom, _plural(each["kind"])
    if namespace is None:
        return custom.create_cluster_custom_object(group, version, plural, each, **how)
    return custom.create_namespaced_custom_object(group, version, namespace, plural, each, **how)


def _path(api: str, kind: str, namespace: str) -> tuple[str, str, str, str]:
    group, _, version = api.partition("/")
    return group, version, namespace, _plural(kind)


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
    """Raises LaunchUnavailable where no API server answers."""
    from urllib3.exceptions import HTTPError

    try:
        yield
    except HTTPError as error:
        raise LaunchUnavailable(f"no API server answers: {files.printable(str(error))[:300]}") from error


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
    return _Cluster(client.CoreV1Api(), client.CustomObjectsApi(), namespace or "default")
