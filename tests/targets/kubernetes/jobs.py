"""Jobs that were decided on machines that are not here, and what clusters are told of them."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from bundle.launch.job import Job, from_plan
from bundle.planning import build_plan
from bundle.recipe import load
from bundle.targets.kubernetes import FORMS_BY_NAME
from bundle.targets.kubernetes.options import KubernetesOptions

Objects = list[dict[str, Any]]

# Everything that can be said of any form.
ALL = KubernetesOptions(
    image="registry.example/bundle@sha256:0123",
    claim="runs",
    name="sft",
    namespace="research",
    mounts=("data:/data", "models:/models"),
    resources=("rdma/ib=8", "memory=512Gi", "cpu=64"),
    selectors=("pool=training", "topology.example/zone="),
    annotations=("networks.example/attach=fast, faster",),
    labels=("cost-centre=c7",),
    tolerations=("nvidia.com/gpu:NoSchedule", "team=rl", "spot="),
    node_affinity=("topology.example/block=b1,b2",),
    excluded_nodes=("node-7",),
    pull_secrets=("registry",),
    service_account="trainer",
    runtime_class="nvidia",
    host_paths=("/mnt/nvme:/scratch",),
    groups=(1000,),
    shared_memory="32Gi",
    rdma=True,
    secret="tokens",
    queue="team",
    priority="high",
    restarts=3,
    grace_seconds=600,
    keep_seconds=3600,
)
LEAST = KubernetesOptions(image="bundle:cpu", claim="runs")
TOPOLOGIES = {"volcano": "2", "ascendjob": ""}


def planned(nodes: int, per_node: int, backend: str, hardware: str, *overrides: str) -> Job:
    made = build_plan(
        load("demo", overrides),
        backend=backend,
        hardware_name=hardware,
        mcore="0.16.1",
        nodes=nodes,
        per_node=per_node,
    )
    made.raise_gravest_problem()
    return from_plan(made, Path("runs/demo"))


def everything(form: str) -> KubernetesOptions:
    """All that a form takes."""
    return replace(ALL, form=form, topology=TOPOLOGIES.get(form, "cloud.example/rack"))


def options_of(job: Job) -> list[KubernetesOptions]:
    """For every form that a job can have: all that it takes, and the least."""
    forms = [form for form in FORMS_BY_NAME if form != "ascendjob" or job.backend == "ascend"]
    return [options for form in forms for options in (everything(form), replace(LEAST, form=form))]


def read(text: str) -> list[dict[str, Any]]:
    return list(YAML(typ="safe").load_all(text))


def plain(value: Any) -> Any:
    """What an API server gets: strings that are nothing more."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return str(value) if isinstance(value, str) else value


def pods(objects: Objects) -> list[tuple[int, dict[str, Any]]]:
    """(how many of them, the pod) of every kind of pod that the workload has."""
    top = objects[-1]
    spec = top["spec"]
    if top["kind"] == "TrainJob":
        inner = objects[-2]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]
        pod = copy.deepcopy(inner["spec"]["template"])
        trainer = spec["trainer"]
        pod["spec"]["containers"][0] |= {"args": trainer["args"], "resources": trainer["resourcesPerNode"]}
        return [(trainer["numNodes"], pod)]
    if top["kind"] == "RayJob":
        groups = spec["rayClusterSpec"]["workerGroupSpecs"]
        return [(group["replicas"], group["template"]) for group in groups]
    if top["kind"] == "AscendJob":
        return [(replica["replicas"], replica["template"]) for replica in spec["replicaSpecs"].values()]
    if "tasks" in spec:
        return [(task["replicas"], task["template"]) for task in spec["tasks"]]
    job = indexed(objects)
    return [(job["completions"], job["template"])]


def indexed(objects: Objects) -> Any:
    """The specification of the indexed Job inside."""
    top = objects[-1]
    if top["kind"] == "Job":
        return top["spec"]
    inner = objects[-2]["spec"]["template"]["spec"] if top["kind"] == "TrainJob" else top["spec"]
    return inner["replicatedJobs"][0]["template"]["spec"]
