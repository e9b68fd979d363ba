"""The pod of one node, as all forms have it. Its container executes the job file of a ConfigMap."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from bundle import capabilities
from bundle.errors import ExitCode, format_value
from bundle.launch import grace
from bundle.launch import job as job_file
from bundle.launch.job import FILE_NAME, Job
from bundle.launch.outcomes import KUBERNETES_NODE_VARIABLE
from bundle.launch.starters import DEFAULT_PORT
from bundle.targets.images import HOME, USER
from bundle.targets.kubernetes import scheduling
from bundle.targets.kubernetes.options import KubernetesOptions, parse_quantity
from bundle.targets.kubernetes.requests import estimate_requests
from bundle.targets.mounts import Mount

JOB_MOUNT_DIRECTORY = "/opt/job"
# The codes of failures that a restart cannot mend: the recipe, the machine, a patch.
PERMANENT_EXIT_CODES = sorted(
    int(code) for code in (ExitCode.USAGE, ExitCode.ENVIRONMENT_UNFIT, ExitCode.PATCHES)
)
CONTAINER_NAME = "node"
_SHARED_MEMORY, _TEMPORARY = "/dev/shm", "/tmp"
# No claim can be mounted at a path that every pod uses, or below a path that cannot be written to.
_POD_PATHS, _UNWRITABLE_PATHS = (
    (HOME, _SHARED_MEMORY, _TEMPORARY, "/dev"),
    (JOB_MOUNT_DIRECTORY, "/proc", "/sys"),
)
_TOPOLOGY_ANNOTATION = "kueue.x-k8s.io/podset-required-topology"
INSTANCE_LABEL = "app.kubernetes.io/instance"  # the label by which the pods of a job are found
_MANAGER_LABEL, _MANAGER = "app.kubernetes.io/managed-by", "mcore-bundle"
MANAGED_OBJECTS_SELECTOR = f"{_MANAGER_LABEL}={_MANAGER}"  # selects every object of mcore-bundle
_METRICS_PORT_ANNOTATION = "prometheus.io/port"
DIRECTORY_ANNOTATION = "mcore-bundle/run-directory"  # of a workload


def list_claim_mounts(options: KubernetesOptions) -> Sequence[Mount]:
    """Return the mounts of the container that come from claims, whose content is not known here."""
    return [Mount(Path(path)) for path in (HOME, *(mount.partition(":")[2] for mount in options.mounts))]


def split_pairs(texts: Sequence[str]) -> dict[str, str]:
    """Return the values of options KEY=VALUE by their keys."""
    return {key: value for key, _, value in (text.partition("=") for text in texts)}


def is_from_job(manifest: Mapping[str, Any], name: str) -> bool:
    """Return whether an object's labels say that mcore-bundle created it for the job of that name."""
    labels = manifest["metadata"].get("labels") or {}
    return labels.get(_MANAGER_LABEL) == _MANAGER and labels.get(INSTANCE_LABEL) == name


class Workload(NamedTuple):
    """The input of a form: the job, the cluster's options, and the names of the objects."""

    job: Job
    options: KubernetesOptions
    name: str
    config_map: str  # the ConfigMap of the job file

    def build_annotated_manifest_skeleton(
        self,
        api: str,
        kind: str,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return the beginning of an object whose controller creates pods.

        Annotations of the options win over `annotations`.
        """
        manifest = self.build_manifest_skeleton(api, kind, labels=labels)
        manifest["metadata"]["annotations"] = {
            **(annotations or {}),
            **split_pairs(self.options.annotations),
            DIRECTORY_ANNOTATION: str(self.job.directory),
        }
        return manifest

    def build_manifest_skeleton(
        self, api: str, kind: str, name: str = "", labels: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Return the beginning of an object: API version, kind, name, namespace and labels."""
        metadata: dict[str, Any] = {"name": name or self.name}
        if self.options.namespace:
            metadata["namespace"] = self.options.namespace
        metadata["labels"] = {**self.labels, **(labels or {})}
        return {"apiVersion": api, "kind": kind, "metadata": metadata}

    @property
    def labels(self) -> dict[str, str]:
        """The labels of every object and every pod of the job: the user's, and those that identify it."""
        return {**split_pairs(self.options.labels), _MANAGER_LABEL: _MANAGER, INSTANCE_LABEL: self.name}

    @property
    def kueue_queue_name_label(self) -> dict[str, str]:
        """The label that hands a workload to Kueue, which holds back every object that has it."""
        return {"kueue.x-k8s.io/queue-name": self.options.queue} if self.options.queue else {}

    @property
    def train_arguments_without_rendezvous(self) -> list[str]:
        """The arguments of the container where its environment holds the node's number."""
        return list(
            job_file.build_train_arguments(
                self.job, Path(JOB_MOUNT_DIRECTORY) / FILE_NAME, preflight=self.options.preflight
            )
        )

    def build_container_arguments(self, host: str, index: str) -> list[str]:
        """Return the arguments of the container where nodes meet at `host`.

        The environment variable `index` holds the node's number.
        """
        file, endpoint = Path(JOB_MOUNT_DIRECTORY) / FILE_NAME, f"{host}:{DEFAULT_PORT}"
        preflight = self.options.preflight
        return list(
            job_file.build_train_arguments(self.job, file, f"$({index})", endpoint, preflight=preflight)
        )

    @property
    def resources(self) -> dict[str, Any]:
        """The limits of every pod, which are its requests too, and the estimated requests of what has none.

        Kubernetes first evicts pods that get more than they request.
        """
        amounts = split_pairs(self.options.resources)
        if device := self.device_resource:
            amounts = {device: str(self.job.per_node)} | amounts
        return {"limits": amounts, "requests": estimate_requests(self.job) | amounts}

    @property
    def device_resource(self) -> str:
        """The name of the resource of the job's devices; empty where the job has no devices."""
        resource = capabilities.find_capabilities(self.job.backend).find_resource(self.job.generation)
        return "" if resource is None else self.options.device or resource.kubernetes

    def find_option_violations(self) -> Iterator[str]:
        """Yield a message for each option that contradicts the pods of the job."""
        if self.device_resource in split_pairs(self.options.resources):
            yield (
                f"--resource {self.device_resource}: the job sets its devices itself ({self.job.per_node}"
                " per node). Use --devices-per-node instead"
            )
        memory = split_pairs(self.options.resources).get("memory")
        shared_memory = self.options.shared_memory
        if memory and 0 < parse_quantity(memory) < parse_quantity(shared_memory):
            yield (
                f"--shared-memory {shared_memory}: is more than --resource memory={memory}, which it counts"
                " towards. Lower the former, or raise the latter"
            )
        if self.options.topology and _TOPOLOGY_ANNOTATION in split_pairs(self.options.annotations):
            yield f"--annotation {_TOPOLOGY_ANNOTATION}: conflicts with --topology. Leave out one of them"
        if taken := {_MANAGER_LABEL, INSTANCE_LABEL} & split_pairs(self.options.labels).keys():
            yield f"--label {min(taken)}: mcore-bundle finds the job by this label. Choose another key"
        mounts = (*self.options.mounts, *self.options.host_paths)
        paths = [str(PurePosixPath(mount.partition(":")[2])) for mount in mounts]
        for path, count in Counter(paths).items():
            if path in _POD_PATHS or any(
                PurePosixPath(path).is_relative_to(directory) for directory in _UNWRITABLE_PATHS
            ):
                yield f"--mount {format_value(path)}: the pod uses this path itself. Choose another path"
            if count > 1:
                yield f"--mount {format_value(path)}: is given more than once"

    def add_kueue_topology_annotation(self, template: dict[str, Any]) -> None:
        """Let Kueue keep the pods of a template within the level of the option `topology`, if any."""
        if self.options.topology:
            template["metadata"].setdefault("annotations", {})[_TOPOLOGY_ANNOTATION] = self.options.topology

    @property
    def scrape_annotations(self) -> dict[str, str]:
        """The annotations by which Prometheus finds rank 0; empty where only its pod reaches the endpoint."""
        endpoint = self.job.recipe.metrics.prometheus
        if endpoint is None or endpoint.is_loopback or not endpoint.port:
            return {}
        return {"prometheus.io/scrape": "true", _METRICS_PORT_ANNOTATION: str(endpoint.port)}

    def build_template(
        self, arguments: list[str], container: str = CONTAINER_NAME, *, has_ranks: bool = True
    ) -> dict[str, Any]:
        """Return the template of the pods, which Kueue calls a pod set."""
        metadata: dict[str, Any] = {"labels": dict(self.labels)}
        scrape_annotations = self.scrape_annotations if has_ranks else {}
        if annotations := scrape_annotations | split_pairs(self.options.annotations):
            metadata["annotations"] = annotations
        spec = self._build_pod_spec(arguments, container)
        if port := scrape_annotations.get(_METRICS_PORT_ANNOTATION):
            spec["containers"][0]["ports"] = [{"name": "bundle-metrics", "containerPort": int(port)}]
        return {"metadata": metadata, "spec": spec}

    def _build_pod_spec(self, arguments: list[str], container: str) -> dict[str, Any]:
        options = self.options
        rights: dict[str, Any] = {"drop": ["ALL"]}
        if options.rdma:
            rights["add"] = ["IPC_LOCK"]  # the network card writes to memory that must stay pinned
        volumes: dict[str, tuple[str, dict[str, Any]]] = {
            "job": (JOB_MOUNT_DIRECTORY, {"configMap": {"name": self.config_map}}),
            "home": (HOME, {"persistentVolumeClaim": {"claimName": options.claim}}),
            "shm": (_SHARED_MEMORY, {"emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory}}),
            "tmp": (_TEMPORARY, {"emptyDir": {}}),
        }
        for number, mount in enumerate(options.mounts):
            claim, _, path = mount.partition(":")
            volumes[f"mount-{number}"] = (path, {"persistentVolumeClaim": {"claimName": claim}})
        for number, mount in enumerate(options.host_paths):
            host, _, path = mount.partition(":")
            volumes[f"host-{number}"] = (path, {"hostPath": {"path": host, "type": "Directory"}})
        pod_container = {
            "name": container,
            "image": options.image,
            "args": arguments,
            "workingDir": HOME,
            "env": [
                {"name": KUBERNETES_NODE_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
            ],
            **({"envFrom": [{"secretRef": {"name": options.secret}}]} if options.secret else {}),
            "resources": self.resources,
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": rights,
            },
            "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()],
        }
        fields = {
            "priorityClassName": options.priority,
            "serviceAccountName": options.service_account,
            "runtimeClassName": options.runtime_class,
            "imagePullSecrets": [{"name": name} for name in options.pull_secrets],
            "nodeSelector": split_pairs(options.selectors),
            "tolerations": scheduling.build_tolerations(options.tolerations),
            "affinity": scheduling.build_affinity(options.node_affinity, options.excluded_nodes),
        }
        return {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": options.grace_seconds or grace.estimate_save_seconds(self.job),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            **{name: value for name, value in fields.items() if value},
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": 0,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",  # else a start changes every file of a claim
                **({"supplementalGroups": list(options.groups)} if options.groups else {}),
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [pod_container],
            "volumes": [{"name": name} | source for name, (_, source) in volumes.items()],
        }
