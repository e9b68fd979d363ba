"""What a cluster wants to know of a job that the job file does not say, and what no cluster would take."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from bundle.errors import format_value

DEFAULT_CLAIM = "runs"  # what the PersistentVolumeClaim of run directories is called, where nobody says
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_MOUNT = re.compile(rf"{_NAME.pattern}:(/(?!\.{{1,2}}(/|$))[\w@.-]+)+/?", re.ASCII)
_PLAIN = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_QUALIFIED = rf"([a-z0-9.-]+/)?{_PLAIN}"
_DEVICE = re.compile(rf"[a-z0-9.-]+/{_PLAIN}")
# As apimachinery's resource.Quantity reads them; of what Kubernetes itself does not know, whole ones.
_QUANTITY = re.compile(r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?")
_CORE_RESOURCE = r"(cpu|memory|ephemeral-storage|hugepages-[0-9]+[KMG]i)"
_RESOURCE = re.compile(rf"{_CORE_RESOURCE}=({_QUANTITY.pattern})|{_DEVICE.pattern}=[0-9]+")
_SELECTOR = re.compile(rf"{_QUALIFIED}=({_PLAIN})?")
_ANNOTATION = re.compile(rf"{_QUALIFIED}=.*")


@dataclass(frozen=True)
class KubernetesOptions:
    """What the cluster wants to know, beside the job.

    `claim` is the PersistentVolumeClaim that all pods see, where the run directory lies, and `mounts` are
    further ones, "CLAIM:/data". `device` is what the cluster calls a device, where that is not its vendor's
    name; `resources` are further ones of each pod, "rdma/ib=1" or "memory=512Gi", both requested and the most
    it gets; `selectors` are labels of the nodes, "KEY=VALUE", `annotations` those of the workload and of its
    pods. The keys of `secret` become variables, `groups` are further groups of the pods' user. `queue` and
    `topology` are those of who schedules the form; `preflight`: first every node does what the job will ask
    of it.
    """

    image: str
    claim: str
    name: str = ""
    form: str = "jobset"
    namespace: str = ""
    mounts: tuple[str, ...] = ()
    device: str = ""
    resources: tuple[str, ...] = ()
    selectors: tuple[str, ...] = ()
    annotations: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    shared_memory: str = "64Gi"
    rdma: bool = False
    secret: str = ""
    queue: str = ""
    topology: str = ""
    priority: str = ""
    restarts: int = 10
    preflight: bool = False
    grace_seconds: int | None = None  # None: as long as the job's checkpoint takes
    keep_seconds: int = 7 * 24 * 3600

    def find_violations(self, name: str, nodes: int) -> Iterator[str]:
        """All that no cluster would take."""
        longest = f"{name}-node-0-{nodes - 1}-xxxxx"  # of a pod, with what its controller puts behind it
        if not _LABEL.fullmatch(name) or len(longest) > 63:
            most = 63 - len(longest) + len(name)
            yield f"--name {format_value(name)}: lower-case letters, digits and dashes, at most {most}"
        if not self.image or not self.image.isprintable() or " " in self.image:
            yield f"--image {format_value(self.image)}: no name of an image"
        named = {"claim": self.claim, "secret": self.secret, "namespace": self.namespace, "queue": self.queue}
        for option, value in (named | {"priority": self.priority}).items():
            if (value or option == "claim") and not _NAME.fullmatch(value):
                yield f"--{option} {format_value(value)}: no name of an object of Kubernetes"
        if self.device and not _DEVICE.fullmatch(self.device):
            yield f"--device {format_value(self.device)}: no name of a resource, such as nvidia.com/gpu"
        lists = (
            ("mount", self.mounts, _MOUNT, "CLAIM:/PATH"),
            ("resource", self.resources, _RESOURCE, "NAME=QUANTITY, such as memory=512Gi or rdma/ib=8"),
            ("selector", self.selectors, _SELECTOR, "KEY=VALUE, a label of nodes"),
            ("annotation", self.annotations, _ANNOTATION, "KEY=VALUE"),
        )
        for option, values, pattern, form in lists:
            for value in values:
                if not pattern.fullmatch(value) or not value.isprintable():
                    yield f"--{option} {format_value(value)}: {form}"
            named_twice = Counter(value.partition("=")[0] for value in values if option != "mount")
            for key in (key for key, count in named_twice.items() if count > 1):
                yield f"--{option} {format_value(key)}: is said more than once"
        if not _QUANTITY.fullmatch(self.shared_memory):
            yield f"--shared-memory {format_value(self.shared_memory)}: a quantity, such as 64Gi"
