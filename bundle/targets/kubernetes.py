"""Kubernetes: the objects of a job, a JobSet or an indexed Job with its Service; nothing speaks to a cluster.

One pod stands for each node and executes the job file, which it finds in a ConfigMap. Fields and their
meaning: kubernetes.io/docs/concepts/workloads/controllers/job, jobset.sigs.k8s.io, kueue.sigs.k8s.io.
"""

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from bundle.errors import ExitCode, UsageError, shown
from bundle.files import json_digest
from bundle.launch.job import NAME, Job
from bundle.launch.starters import DEFAULT_PORT

FORMS = ("jobset", "job")
# Where an image of ours writes, and its user (images/README.md); where the pod finds the job file.
HOME, USER, JOB = "/home/bundle", 10001, "/opt/job"
# What a restart cannot mend: the recipe, the machine, a patch.
NEVER = (ExitCode.USAGE, ExitCode.ENVIRONMENT_UNFIT, ExitCode.PATCHES)
_DEVICES = {"cuda": "nvidia.com/gpu", "ascend": "huawei.com/Ascend910", "cpu": ""}
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_MOUNT = re.compile(rf"{_NAME.pattern}:/[\w@./-]*", re.ASCII)
_RESOURCE = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9._-]+=[0-9.]+[A-Za-z]*")
_LARGEST_FILE = 1_000_000  # 1 MiB is that of a ConfigMap with its names
_POD = "node"


@dataclass(frozen=True)
class Options:
    """What the cluster wants to know, beside the job.

    `claim` is the PersistentVolumeClaim that all pods see, where the run directory lies, and `mounts` are
    further ones, "CLAIM:/data"; `resources` are further ones of each pod, "rdma/ib=1" or "memory=512Gi", both
    requested and the most it gets; the keys of `secret` become variables.
    """

    image: str
    claim: str
    name: str = ""
    form: str = FORMS[0]
    namespace: str = ""
    mounts: tuple[str, ...] = ()
    resources: tuple[str, ...] = ()
    shared_memory: str = "64Gi"
    rdma: bool = False
    secret: str = ""
    queue: str = ""
    topology: str = ""
    priority: str = ""
    restarts: int = 10
    grace_seconds: int = 300
    keep_seconds: int = 7 * 24 * 3600

    def violations(self, name: str, nodes: int) -> Iterator[str]:
        """All that no cluster would take."""
        longest = f"{name}-{_POD}-0-{nodes - 1}-xxxxx"  # of a pod, with what its controller puts behind it
        if not _LABEL.fullmatch(name) or len(longest) > 63:
            most = 63 - len(longest) + len(name)
            yield f"--name {shown(name)}: lower-case letters, digits and dashes, at most {most}"
        if self.form not in FORMS:
            yield f"--form {shown(self.form)}: one of {', '.join(FORMS)}"
        if not self.image or not self.image.isprintable() or " " in self.image:
            yield f"--image {shown(self.image)}: no name of an image"
        named = {"claim": self.claim, "secret": self.secret, "namespace": self.namespace, "queue": self.queue}
        for option, value in (named | {"priority": self.priority}).items():
            if (value or option == "claim") and not _NAME.fullmatch(value):
                yield f"--{option} {shown(value)}: no name of an object of Kubernetes"
        for mount in self.mounts:
            if not _MOUNT.fullmatch(mount):
                yield f"--mount {shown(mount)}: CLAIM:/PATH"
        for resource in self.resources:
            if not _RESOURCE.fullmatch(resource):
                yield f"--resource {shown(resource)}: NAME=QUANTITY, such as memory=512Gi"


def named(job: Job) -> str:
    """The recipe's name as Kubernetes spells names."""
    return re.sub(r"[^a-z0-9]+", "-", job.recipe.name.lower()).strip("-")


def objects(job: Job, options: Options) -> list[dict[str, Any]]:
    """The objects of a job, in the order in which they are made. Raises UsageError with all that is wrong."""
    name, decided = options.name or named(job), job.text()
    wrong = list(options.violations(name, job.nodes))
    if (size := len(decided.encode())) > _LARGEST_FILE:
        wrong.append(f"the job file has {size} bytes, more than a ConfigMap holds: shorten the recipe")
    if wrong:
        raise UsageError("no objects of Kubernetes can be written", wrong)
    digest = json_digest(job.dump())
    file = _object("v1", "ConfigMap", f"{name}-{digest}", options)
    file |= {"immutable": True, "data": {NAME: LiteralScalarString(decided)}}
    # A label of Kueue holds back every object that has it, so only the workload gets it.
    held = {"kueue.x-k8s.io/queue-name": options.queue} if options.queue else {}
    if options.form == "job":
        service = _object("v1", "Service", name, options)
        service["spec"] = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": name},
            "ports": [{"name": "rendezvous", "port": DEFAULT_PORT}],
        }
        workload = _object("batch/v1", "Job", name, options, held)
        workload["spec"] = _job(job, options, f"{name}-0.{name}", file["metadata"]["name"])
        workload["spec"]["ttlSecondsAfterFinished"] = options.keep_seconds
        workload["spec"]["template"]["spec"]["subdomain"] = name
        return [file, service, workload]
    workload = _object("jobset.x-k8s.io/v1alpha2", "JobSet", name, options, held)
    spec = _job(job, options, f"{name}-{_POD}-0-0.{name}", file["metadata"]["name"])
    workload["spec"] = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
        # One pod that is replaced finds no ranks to join: all of them begin again, from the last checkpoint.
        "failurePolicy": {
            "maxRestarts": options.restarts,
            "rules": [{"name": "never", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        },
        "ttlSecondsAfterFinished": options.keep_seconds,
        "replicatedJobs": [{"name": _POD, "replicas": 1, "template": {"spec": spec}}],
    }
    return [file, workload]


def documents(job: Job, options: Options) -> str:
    """The objects as YAML documents."""
    yaml, out = YAML(), io.StringIO()
    yaml.default_flow_style, yaml.width = False, 110
    yaml.explicit_start = True
    yaml.dump_all(objects(job, options), out)
    return out.getvalue()


def _object(api: str, kind: str, name: str, options: Options, labels: Any = None) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name}
    if options.namespace:
        metadata["namespace"] = options.namespace
    metadata["labels"] = {"app.kubernetes.io/managed-by": "mcore-bundle"} | (labels or {})
    return {"apiVersion": api, "kind": kind, "metadata": metadata}


def _job(job: Job, options: Options, host: str, file: str) -> dict[str, Any]:
    """The spec of a Job: one pod for each node, none of which is started again by itself."""
    annotations = {"kueue.x-k8s.io/podset-required-topology": options.topology} if options.topology else {}
    return {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": _POD,
                        "operator": "In",
                        "values": sorted(int(code) for code in NEVER),
                    },
                }
            ]
        },
        "template": {
            **({"metadata": {"annotations": annotations}} if annotations else {}),
            "spec": _pod(job, options, host, file),
        },
    }


def _pod(job: Job, options: Options, host: str, file: str) -> dict[str, Any]:
    words = ["train", f"--job={JOB}/{NAME}"]
    if job.nodes > 1:
        # Kubernetes puts the index of the pod in its place.
        words += [
            f"--nodes={job.nodes}",
            "--node-rank=$(JOB_COMPLETION_INDEX)",
            f"--rendezvous={host}:{DEFAULT_PORT}",
        ]
    amounts = dict(each.split("=") for each in options.resources)
    if device := _DEVICES[job.backend]:
        amounts = {device: str(job.per_node)} | amounts
    capabilities: dict[str, Any] = {"drop": ["ALL"]}
    if options.rdma:
        capabilities["add"] = ["IPC_LOCK"]  # memory that the network card writes to stays where it is
    volumes: dict[str, tuple[str, dict[str, Any]]] = {
        "job": (JOB, {"configMap": {"name": file}}),
        "home": (HOME, {"persistentVolumeClaim": {"claimName": options.claim}}),
        "shm": ("/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory}}),
        "tmp": ("/tmp", {"emptyDir": {}}),
    }
    for number, mount in enumerate(options.mounts):
        claim, _, path = mount.partition(":")
        volumes[f"mount-{number}"] = (path, {"persistentVolumeClaim": {"claimName": claim}})
    container = {
        "name": _POD,
        "image": options.image,
        "args": words,
        "workingDir": HOME,
        **({"envFrom": [{"secretRef": {"name": options.secret}}]} if options.secret else {}),
        "resources": {"limits": amounts, "requests": dict(amounts)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": capabilities,
        },
        "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()],
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace_seconds,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **({"priorityClassName": options.priority} if options.priority else {}),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": 0,
            "fsGroup": 0,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": name} | source for name, (_, source) in volumes.items()],
    }
