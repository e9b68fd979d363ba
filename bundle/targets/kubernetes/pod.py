"""The pod of one node: what is alike in every form. Its container executes the job file of a ConfigMap."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from bundle import capabilities
from bundle.errors import ExitCode, shown
from bundle.launch import grace
from bundle.launch import job as job_file
from bundle.launch.job import NAME, Job
from bundle.launch.outcomes import KUBERNETES_NODE
from bundle.launch.starters import DEFAULT_PORT
from bundle.targets.kubernetes.options import Options
from bundle.targets.mounts import Mount

# Where an image of ours writes, and its user (images/README.md); where the pod finds the job file.
HOME, USER, JOB = "/home/bundle", 10001, "/opt/job"
# What a restart cannot mend: the recipe, the machine, a patch.
NEVER = sorted(int(code) for code in (ExitCode.USAGE, ExitCode.ENVIRONMENT_UNFIT, ExitCode.PATCHES))
CONTAINER = "node"
_SHARED, _TEMPORARY = "/dev/shm", "/tmp"
# Where no claim can be mounted: what every pod has there, and below what cannot be written to.
_TAKEN, _WITHHELD = (HOME, _SHARED, _TEMPORARY, "/dev"), (JOB, "/proc", "/sys")
_LEVEL = "kueue.x-k8s.io/podset-required-topology"
INSTANCE = "app.kubernetes.io/instance"  # the label by which the pods of a job are found
_MANAGED, _BY_US = "app.kubernetes.io/managed-by", "mcore-bundle"


def mounts(options: Options) -> Sequence[Mount]:
    """What the container finds of claims: what these hold is not known here."""
    return [Mount(Path(path)) for path in (HOME, *(each.partition(":")[2] for each in options.mounts))]


def pairs(said: Sequence[str]) -> dict[str, str]:
    """By its key, what options say as KEY=VALUE."""
    return {key: value for key, _, value in (each.partition("=") for each in said)}


def is_of(there: Mapping[str, Any], name: str) -> bool:
    """Whether an object of a cluster was made for the job of that name, by us: its labels say so."""
    labels = there["metadata"].get("labels") or {}
    return labels.get(_MANAGED) == _BY_US and labels.get(INSTANCE) == name


class Workload(NamedTuple):
    """What a form is rendered from: the job, what the cluster wants to know, what the objects are called."""

    job: Job
    options: Options
    name: str
    file: str  # the ConfigMap of the job file

    def workload(
        self,
        api: str,
        kind: str,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """The beginning of the object that its controller makes the pods of; what the options say wins."""
        begun = self.object(api, kind, labels=labels)
        if said := {**(annotations or {}), **pairs(self.options.annotations)}:
            begun["metadata"]["annotations"] = said
        return begun

    def object(
        self, api: str, kind: str, name: str = "", labels: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """The beginning of an object."""
        metadata: dict[str, Any] = {"name": name or self.name}
        if self.options.namespace:
            metadata["namespace"] = self.options.namespace
        metadata["labels"] = {**self.labels, **(labels or {})}
        return {"apiVersion": api, "kind": kind, "metadata": metadata}

    @property
    def labels(self) -> dict[str, str]:
        """What every object and every pod of the job is found by."""
        return {_MANAGED: _BY_US, INSTANCE: self.name}

    @property
    def queued(self) -> dict[str, str]:
        """The label that hands a workload to Kueue, which holds back every object that has it."""
        return {"kueue.x-k8s.io/queue-name": self.options.queue} if self.options.queue else {}

    @property
    def words(self) -> list[str]:
        """What the container is told, where its environment says which node it is."""
        return list(job_file.words(self.job, Path(JOB) / NAME, preflight=self.options.preflight))

    def words_at(self, host: str, index: str) -> list[str]:
        """What the container is told where nodes meet at `host`, and the variable `index` says its own."""
        file, where = Path(JOB) / NAME, f"{host}:{DEFAULT_PORT}"
        preflight = self.options.preflight
        return list(job_file.words(self.job, file, f"$({index})", where, preflight=preflight))

    @property
    def resources(self) -> dict[str, Any]:
        """What every pod asks for, and no more than that: pods that get more than they ask for go first."""
        amounts = pairs(self.options.resources)
        if device := self.device:
            amounts = {device: str(self.job.per_node)} | amounts
        return {"limits": amounts, "requests": dict(amounts)}

    @property
    def device(self) -> str:
        """What the cluster calls a device of the job; empty where it asks for none."""
        resource = capabilities.of(self.job.backend).resource(self.job.generation)
        return "" if resource is None else self.options.device or resource.kubernetes

    def misfits(self) -> Iterator[str]:
        """What of the options contradicts the pods as the job has them."""
        if self.device in pairs(self.options.resources):
            yield (
                f"--resource {self.device}: the job decides about its devices, {self.job.per_node} of a node;"
                " see --devices-per-node"
            )
        if self.options.topology and _LEVEL in pairs(self.options.annotations):
            yield f"--annotation {_LEVEL}: --topology says it"
        paths = [str(PurePosixPath(mount.partition(":")[2])) for mount in self.options.mounts]
        for path, count in Counter(paths).items():
            if path in _TAKEN or any(PurePosixPath(path).is_relative_to(each) for each in _WITHHELD):
                yield f"--mount {shown(path)}: the pod has something else there; say another path"
            if count > 1:
                yield f"--mount {shown(path)}: is said more than once"

    def keep_together(self, template: dict[str, Any]) -> None:
        """Has Kueue keep the pods of a template within the level of nodes that was asked for, if any."""
        if self.options.topology:
            template["metadata"].setdefault("annotations", {})[_LEVEL] = self.options.topology

    def template(self, words: list[str], container: str = CONTAINER) -> dict[str, Any]:
        """The template of the pods; in Kueue's words, of a pod set."""
        metadata: dict[str, Any] = {"labels": dict(self.labels)}
        if annotations := pairs(self.options.annotations):
            metadata["annotations"] = annotations
        return {"metadata": metadata, "spec": self._spec(words, container)}

    def _spec(self, words: list[str], container: str) -> dict[str, Any]:
        options = self.options
        rights: dict[str, Any] = {"drop": ["ALL"]}
        if options.rdma:
            rights["add"] = ["IPC_LOCK"]  # memory that the network card writes to stays where it is
        volumes: dict[str, tuple[str, dict[str, Any]]] = {
            "job": (JOB, {"configMap": {"name": self.file}}),
            "home": (HOME, {"persistentVolumeClaim": {"claimName": options.claim}}),
            "shm": (_SHARED, {"emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory}}),
            "tmp": (_TEMPORARY, {"emptyDir": {}}),
        }
        for number, mount in enumerate(options.mounts):
            claim, _, path = mount.partition(":")
            volumes[f"mount-{number}"] = (path, {"persistentVolumeClaim": {"claimName": claim}})
        the_container = {
            "name": container,
            "image": options.image,
            "args": words,
            "workingDir": HOME,
            "env": [{"name": KUBERNETES_NODE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
            **({"envFrom": [{"secretRef": {"name": options.secret}}]} if options.secret else {}),
            "resources": self.resources,
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": rights,
            },
            "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()],
        }
        selector = pairs(options.selectors)
        return {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": options.grace_seconds or grace.seconds(self.job),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            **({"priorityClassName": options.priority} if options.priority else {}),
            **({"nodeSelector": selector} if selector else {}),
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": 0,
                "fsGroup": 0,
                **({"supplementalGroups": list(options.groups)} if options.groups else {}),
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [the_container],
            "volumes": [{"name": name} | source for name, (_, source) in volumes.items()],
        }
