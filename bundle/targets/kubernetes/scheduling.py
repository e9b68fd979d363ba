"""Where the pods of a job may run, and as whom: the fields of a pod that admins of a cluster ask for."""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from bundle.errors import format_value

Tolerations = Annotated[
    tuple[str, ...],
    typer.Option("--toleration", metavar="KEY[=VALUE][:EFFECT]", help="Tolerate this taint of nodes."),
]
NodeAffinity = Annotated[
    tuple[str, ...],
    typer.Option(
        "--node-affinity", metavar="KEY=VALUE,...", help="Run only on nodes that have one of these labels."
    ),
]
ExcludedNodes = Annotated[
    tuple[str, ...], typer.Option("--exclude-node", metavar="NAME", help="Never run on this node.")
]
PullSecrets = Annotated[
    tuple[str, ...], typer.Option("--image-pull-secret", metavar="NAME", help="Pull images with this Secret.")
]
ServiceAccount = Annotated[str, typer.Option(help="Run as this ServiceAccount, without its token.")]
RuntimeClass = Annotated[str, typer.Option(help="Use this RuntimeClass of containers.")]

_HOST_LABEL = "kubernetes.io/hostname"
# The name of a label's value, and that of a key with its prefix.
LABEL_VALUE_REGEX = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
LABEL_KEY_REGEX = rf"([a-z0-9.-]+/)?{LABEL_VALUE_REGEX}"
_TAINT_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_TOLERATION_PATTERN = re.compile(
    rf"({LABEL_KEY_REGEX})(=({LABEL_VALUE_REGEX})?)?(:({'|'.join(_TAINT_EFFECTS)}))?"
)
_AFFINITY_PATTERN = re.compile(rf"{LABEL_KEY_REGEX}=({LABEL_VALUE_REGEX})(,{LABEL_VALUE_REGEX})*")
OBJECT_NAME_PATTERN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


def find_violations(
    tolerations: Sequence[str], affinities: Sequence[str], nodes: Sequence[str]
) -> Iterator[str]:
    """Yield a message for each option whose form no cluster accepts."""
    forms = (
        (
            "toleration",
            tolerations,
            _TOLERATION_PATTERN,
            f"KEY[=VALUE][:EFFECT] with EFFECT {', '.join(_TAINT_EFFECTS)}",
        ),
        ("node-affinity", affinities, _AFFINITY_PATTERN, "KEY=VALUE[,VALUE...], such as zone=a,b"),
        ("exclude-node", nodes, OBJECT_NAME_PATTERN, "a node name of lower-case letters, digits, - and ."),
    )
    for option, values, pattern, form in forms:
        for value in values:
            if not pattern.fullmatch(value):
                yield f"--{option} {format_value(value)}: must be {form}"


def build_tolerations(tolerations: Sequence[str]) -> list[dict[str, str]]:
    """Return the tolerations of a pod; one without a value tolerates all values of its key."""
    result = []
    for text in tolerations:
        rest, _, effect = text.partition(":")
        key, equals, value = rest.partition("=")
        toleration = {"key": key, "operator": "Equal", "value": value} if equals else {"key": key}
        toleration.setdefault("operator", "Exists")
        result.append(toleration | ({"effect": effect} if effect else {}))
    return result


def build_affinity(affinities: Sequence[str], excluded_nodes: Sequence[str]) -> dict[str, Any]:
    """Return the affinity of a pod to nodes: all conditions must hold. Empty without conditions."""
    conditions: list[dict[str, Any]] = []
    for text in affinities:
        key, _, values = text.partition("=")
        conditions.append({"key": key, "operator": "In", "values": values.split(",")})
    if excluded_nodes:
        conditions.append({"key": _HOST_LABEL, "operator": "NotIn", "values": list(excluded_nodes)})
    if not conditions:
        return {}
    required = {"nodeSelectorTerms": [{"matchExpressions": conditions}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
