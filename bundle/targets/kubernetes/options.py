"""The options of a job on a cluster that the job file does not have, and the checks of their form."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer

from bundle.errors import format_value
from bundle.targets.kubernetes import scheduling
from bundle.targets.kubernetes.scheduling import LABEL_KEY_REGEX, LABEL_VALUE_REGEX, OBJECT_NAME_PATTERN
from bundle.targets.options import Grace, Preflight, allow_only

# A description of each form, by the name that --form takes, the default first; FORMS_BY_NAME builds them.
WORKLOAD_FORM_DESCRIPTIONS = {
    "jobset": "restarts all nodes when one is lost",
    "job": "ends when a node is lost, and needs no controller",
    "trainjob": "needs Kubeflow Trainer",
    "volcano": "needs Volcano",
    "rayjob": "needs KubeRay",
    "ascendjob": "needs MindCluster",
}
DEFAULT_CLAIM = "runs"  # the default PersistentVolumeClaim for run directories
_DNS_LABEL_PATTERN = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_PATH_PATTERN = r"(/(?!\.{1,2}(/|$))[\w@.-]+)+/?"
_MOUNT_PATTERN = re.compile(rf"{OBJECT_NAME_PATTERN.pattern}:{_PATH_PATTERN}", re.ASCII)
_DEVICE_PATTERN = re.compile(rf"[a-z0-9.-]+/{LABEL_VALUE_REGEX}")
# Quantities in the form of apimachinery's resource.Quantity; extended resources take whole numbers.
_QUANTITY_PATTERN = re.compile(r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?")
_QUANTITY_FACTORS = {
    **{letter: Fraction(1000) ** power for power, letter in enumerate(("n", "u", "m", "", *"kMGTPE"), -3)},
    **{f"{letter}i": Fraction(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
}
_BUILT_IN_RESOURCE_PATTERN = r"(cpu|memory|ephemeral-storage|hugepages-[0-9]+[KMG]i)"
_RESOURCE_ASSIGNMENT_PATTERN = re.compile(
    rf"{_BUILT_IN_RESOURCE_PATTERN}=({_QUANTITY_PATTERN.pattern})|{_DEVICE_PATTERN.pattern}=[0-9]+"
)
_RESOURCE_SYNTAX_DESCRIPTION = "a Kubernetes resource and its quantity, such as memory=512Gi or rdma/ib=8"
_SELECTOR_PATTERN = re.compile(rf"{LABEL_KEY_REGEX}=({LABEL_VALUE_REGEX})?")
_ANNOTATION_PAIR_PATTERN = re.compile(rf"{LABEL_KEY_REGEX}=.*")
_HOST_PATH_MOUNT_PATTERN = re.compile(rf"{_PATH_PATTERN}:{_PATH_PATTERN}", re.ASCII)


def parse_quantity(text: str) -> Fraction:
    """Return the number that a quantity of Kubernetes says; 0 for a text that is no quantity."""
    match = _QUANTITY_PATTERN.fullmatch(text)
    if match is None:
        return Fraction(0)
    number, suffix = Fraction(match[1]), match[3] or ""
    return number * (
        _QUANTITY_FACTORS[suffix] if suffix in _QUANTITY_FACTORS else Fraction(10) ** int(suffix[1:])
    )


@dataclass(frozen=True)
class KubernetesOptions:
    """The cluster's options beside the job: the image, and what the user chooses.

    The run directory lies in `claim`. A pod requests `resources`, and gets no more.
    """

    image: str = ""
    claim: Annotated[
        str, typer.Option(help="Mount this PersistentVolumeClaim on all nodes, for the run directory.")
    ] = DEFAULT_CLAIM
    form: Annotated[
        str,
        typer.Option(
            callback=allow_only(WORKLOAD_FORM_DESCRIPTIONS, may_be_empty=False),
            help="; ".join(f"{name} {text}" for name, text in WORKLOAD_FORM_DESCRIPTIONS.items()) + ".",
        ),
    ] = next(iter(WORKLOAD_FORM_DESCRIPTIONS))
    name: Annotated[str, typer.Option(help="Name the objects. Default: the recipe's name.")] = ""
    namespace: Annotated[str, typer.Option(help="Create objects here. Default: kubectl's namespace.")] = ""
    mounts: Annotated[
        tuple[str, ...],
        typer.Option("--mount", metavar="CLAIM:/PATH", help="Mount another claim, with data or a model."),
    ] = ()
    resources: Annotated[
        tuple[str, ...],
        typer.Option(
            "--resource", metavar="NAME=QUANTITY", help="Request per node: memory=512Gi, cpu=64, rdma/ib=8"
        ),
    ] = ()
    device: Annotated[
        str, typer.Option(metavar="NAME", help="Request devices by this resource. Default: the vendor's.")
    ] = ""
    selectors: Annotated[
        tuple[str, ...],
        typer.Option("--selector", metavar="KEY=VALUE", help="Run only on nodes with this label."),
    ] = ()
    annotations: Annotated[
        tuple[str, ...],
        typer.Option("--annotation", metavar="KEY=VALUE", help="Annotate the workload and its pods."),
    ] = ()
    labels: Annotated[
        tuple[str, ...],
        typer.Option("--label", metavar="KEY=VALUE", help="Label the workload and its pods."),
    ] = ()
    tolerations: scheduling.Tolerations = ()
    node_affinity: scheduling.NodeAffinity = ()
    excluded_nodes: scheduling.ExcludedNodes = ()
    pull_secrets: scheduling.PullSecrets = ()
    service_account: scheduling.ServiceAccount = ""
    runtime_class: scheduling.RuntimeClass = ""
    host_paths: Annotated[
        tuple[str, ...],
        typer.Option("--host-path", metavar="/ON-NODE:/PATH", help="Mount a directory of the node."),
    ] = ()
    patch: Annotated[
        Path | None,
        typer.Option(help="Merge each YAML document of this file into the objects or pods of its kind."),
    ] = None
    groups: Annotated[
        tuple[int, ...],
        typer.Option(
            "--group",
            min=0,
            metavar="GID",
            help="Add this group ID to the pods. With NPUs: the group of the device files.",
        ),
    ] = ()
    shared_memory: Annotated[str, typer.Option(metavar="QUANTITY", help="Set the size of /dev/shm.")] = "64Gi"
    rdma: Annotated[bool, typer.Option("--rdma", help="Let the pods pin memory for a network card.")] = False
    secret: Annotated[str, typer.Option(help="Set the keys of this Secret as environment variables.")] = ""
    queue: Annotated[str, typer.Option(help="Use this Kueue or Volcano queue: all pods start or none.")] = ""
    topology: Annotated[
        str, typer.Option(help="Keep all pods within this topology level of Kueue, or this tier of Volcano.")
    ] = ""
    priority: Annotated[str, typer.Option(help="Use this PriorityClass.")] = ""
    restarts: Annotated[int, typer.Option(min=0, help="Restart all nodes at most this number of times.")] = 10
    preflight: Preflight = False
    grace_seconds: Grace = None
    keep_seconds: Annotated[
        int,
        typer.Option("--keep", min=0, metavar="SECONDS", help="Keep the objects this long after the end."),
    ] = 7 * 24 * 3600

    def find_violations(self, name: str, nodes: int) -> Iterator[str]:
        """Yield a message for each option that no cluster would accept."""
        longest = f"{name}-node-0-{nodes - 1}-xxxxx"  # the name of a pod, with the suffix of its controller
        if not _DNS_LABEL_PATTERN.fullmatch(name) or len(longest) > 63:
            most = 63 - len(longest) + len(name)
            yield f"--name {format_value(name)}: needs at most {most} lower-case letters, digits, dashes"
        if not self.image or not self.image.isprintable() or " " in self.image:
            yield f"--image {format_value(self.image)}: not the name of an image"
        named = {"claim": self.claim, "secret": self.secret, "namespace": self.namespace, "queue": self.queue}
        named |= {"priority": self.priority, "service-account": self.service_account}
        named |= {"runtime-class": self.runtime_class}
        pairs = [*named.items(), *(("image-pull-secret", name) for name in self.pull_secrets)]
        for option, value in pairs:
            if (value or option == "claim") and not OBJECT_NAME_PATTERN.fullmatch(value):
                yield (
                    f"--{option} {format_value(value)}: must be a Kubernetes name of lower-case letters,"
                    " digits, - and ."
                )
        if self.device and not _DEVICE_PATTERN.fullmatch(self.device):
            yield f"--device {format_value(self.device)}: must be a device resource, such as nvidia.com/gpu"
        lists = (
            (
                "mount",
                self.mounts,
                _MOUNT_PATTERN,
                "CLAIM:/PATH with a normalized path below /, such as data:/mnt/data",
            ),
            ("resource", self.resources, _RESOURCE_ASSIGNMENT_PATTERN, _RESOURCE_SYNTAX_DESCRIPTION),
            ("selector", self.selectors, _SELECTOR_PATTERN, "a Kubernetes label KEY=VALUE"),
            ("annotation", self.annotations, _ANNOTATION_PAIR_PATTERN, "KEY=VALUE"),
            ("label", self.labels, _SELECTOR_PATTERN, "a Kubernetes label KEY=VALUE"),
            (
                "host-path",
                self.host_paths,
                _HOST_PATH_MOUNT_PATTERN,
                "/ON-NODE:/PATH with normalized paths below /",
            ),
        )
        for option, values, pattern, form in lists:
            for value in values:
                if not pattern.fullmatch(value) or not value.isprintable():
                    yield f"--{option} {format_value(value)}: must be {form}"
            named_twice = Counter(value.partition("=")[0] for value in values if option != "mount")
            for key in (key for key, count in named_twice.items() if count > 1):
                yield f"--{option} {format_value(key)}: is given more than once"
        yield from scheduling.find_violations(self.tolerations, self.node_affinity, self.excluded_nodes)
        if not _QUANTITY_PATTERN.fullmatch(self.shared_memory):
            yield f"--shared-memory {format_value(self.shared_memory)}: must be a quantity, such as 64Gi"
