"""The objects of a job: as golden files, against Kubernetes' own schemas, and against each other."""

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from bundle.errors import UsageError
from bundle.launch import job as job_file
from bundle.launch.job import Job, of_plan
from bundle.planning import plan_for
from bundle.recipe import load
from bundle.targets import kubernetes
from bundle.targets.kubernetes import Options

GOLDEN = Path(__file__).parent / "golden"
SCHEMAS = Path(__file__).parents[3] / "shared/crds"
ALL = Options(
    image="registry.example/bundle@sha256:0123",
    claim="runs",
    name="sft",
    namespace="research",
    mounts=("data:/data", "models:/models"),
    resources=("rdma/ib=8", "memory=512Gi", "cpu=64"),
    shared_memory="32Gi",
    rdma=True,
    secret="tokens",
    queue="team",
    topology="cloud.example/rack",
    priority="high",
    restarts=3,
    grace_seconds=600,
    keep_seconds=3600,
)
LEAST = Options(image="bundle:cpu", claim="runs", form="job")


def planned(nodes: int, per_node: int, backend: str, hardware: str, *overrides: str) -> Job:
    made = plan_for(
        load("demo", overrides),
        backend=backend,
        named=hardware,
        mcore="0.16.1",
        nodes=nodes,
        per_node=per_node,
    )
    made.refuse()
    return of_plan(made, Path("runs/demo"))


@pytest.fixture(scope="module")
def wide() -> Job:
    return planned(4, 8, "cuda", "h200", "train.global_batch_size=256")


@pytest.fixture(scope="module")
def small() -> Job:
    return planned(2, 1, "cpu", "cpu")


def read(text: str) -> list[dict[str, Any]]:
    return list(YAML(typ="safe").load_all(text))


def masked(text: str) -> str:
    """The documents without the job file, which changes with the package, and its digest."""
    text = re.sub(r"  job\.json: \|\n(    .*\n)+", "  job.json: |\n    ...\n", text)
    return re.sub(r"-[0-9a-f]{16}\b", "-DIGEST", text)


@pytest.mark.parametrize(("name", "job", "options"), [("jobset", "wide", ALL), ("job", "small", LEAST)])
def test_the_objects_are_the_golden_ones(request, name, job, options):
    found = kubernetes.documents(request.getfixturevalue(job), options)
    assert masked(found) == (GOLDEN / f"kubernetes-{name}.yaml").read_text()


@pytest.mark.parametrize("options", [ALL, LEAST, replace(ALL, form="job"), replace(LEAST, form="jobset")])
def test_the_job_file_comes_through_yaml_as_it_is(wide, options):
    objects = read(kubernetes.documents(wide, options))
    assert objects[0]["data"]["job.json"] == wide.text()
    assert job_file.parse(objects[0]["data"]["job.json"]).digest == wide.digest


@pytest.mark.parametrize("version", ["1.29.0", "1.37.0"])
@pytest.mark.parametrize("options", [ALL, LEAST])
def test_kubernetes_takes_the_objects(wide, small, version, options):
    validator = pytest.importorskip("kubernetes_validate")
    for job in (wide, small):
        for each in kubernetes.objects(job, options):
            if each["kind"] == "JobSet":
                spec = each["spec"]["replicatedJobs"][0]["template"]["spec"]
                each = {"apiVersion": "batch/v1", "kind": "Job", "metadata": each["metadata"], "spec": spec}
            validator.validate(plain(each), version, strict=True)


def test_jobset_takes_its_object(wide):
    jsonschema = pytest.importorskip("jsonschema")
    file = SCHEMAS / "jobset.x-k8s.io_jobsets.yaml"
    if not file.exists():
        pytest.skip(f"{file.name} is not in ../shared/crds")
    definition = YAML(typ="safe").load(file)
    (version,) = definition["spec"]["versions"]
    check = jsonschema.Draft202012Validator(closed(version["schema"]["openAPIV3Schema"]))
    jobset = plain(kubernetes.objects(wide, ALL)[-1])
    assert jobset["apiVersion"] == f"{definition['spec']['group']}/{version['name']}"
    assert not list(check.iter_errors(jobset))
    jobset["spec"]["failurePolicy"]["maxRestart"] = 3
    assert list(check.iter_errors(jobset))


def plain(value: Any) -> Any:
    """What an API server gets: strings that are nothing more."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return str(value) if isinstance(value, str) else value


def closed(schema: Any) -> Any:
    """A CRD's schema as JSON schema, where an object has no fields but those that it names."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items() if not str(key).startswith("x-kubernetes")}
    if schema.get("x-kubernetes-int-or-string"):
        made["type"] = ["integer", "string"]
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        preserved = schema.get("x-kubernetes-preserve-unknown-fields")
        made |= {} if preserved else {"additionalProperties": False}
    return made


def disagreements(objects: list[dict[str, Any]]) -> Iterator[str]:
    """Every way in which the objects of one job do not fit each other; read from them alone."""
    kinds = {each["kind"]: each for each in objects}
    top = kinds.get("JobSet") or kinds["Job"]
    name = top["metadata"]["name"]
    job = top["spec"] if top["kind"] == "Job" else top["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    container = pod["containers"][0]
    words = container["args"]
    host = next((word for word in words if word.startswith("--rendezvous=")), "=").partition("=")[2]
    if top["kind"] == "Job":
        service = kinds["Service"]
        if pod["subdomain"] != service["metadata"]["name"] or service["spec"]["clusterIP"] != "None":
            yield "the pods' subdomain is no headless service"
        if service["spec"]["selector"] != {"batch.kubernetes.io/job-name": name}:
            yield "the service does not select the job's pods"
        first = f"{name}-0.{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    else:
        network = top["spec"]["network"]
        replicated = top["spec"]["replicatedJobs"][0]["name"]
        first = f"{name}-{replicated}-0-0.{network['subdomain']}:29500"
        if not network["enableDNSHostnames"] or not network["publishNotReadyAddresses"]:
            yield "pods have no names before they are ready"
        if "PodFailurePolicy" not in top["spec"]["failurePolicy"]["rules"][0]["onJobFailureReasons"]:
            yield "a code that no restart mends restarts"
    if job["completions"] > 1 and host != first:
        yield "the rendezvous is not at the first pod"
    if job["parallelism"] != job["completions"] or f"--nodes={job['completions']}" not in words:
        yield "not as many pods as nodes"
    if job["completionMode"] != "Indexed" or job["backoffLimit"] != 0:
        yield "a pod is replaced alone"
    if pod["restartPolicy"] != "Never":
        yield "a pod failure policy needs pods that are never restarted"
    if job["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"] != container["name"]:
        yield "the failure policy is about no container"
    if {mount["name"] for mount in container["volumeMounts"]} != {
        volume["name"] for volume in pod["volumes"]
    }:
        yield "a mount has no volume"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    if volumes["job"]["configMap"]["name"] != kinds["ConfigMap"]["metadata"]["name"]:
        yield "the job file is not that of the ConfigMap"
    if container["resources"]["limits"] != container["resources"]["requests"]:
        yield "the pod may be evicted before others"
    if len({each["metadata"].get("namespace") for each in objects}) != 1:
        yield "not all in one namespace"


@pytest.mark.parametrize("options", [ALL, LEAST, replace(ALL, form="job"), replace(LEAST, form="jobset")])
def test_the_objects_fit_each_other(wide, small, options):
    for job in (wide, small):
        assert not list(disagreements(kubernetes.objects(job, options)))


def _pod_of(objects: list[dict[str, Any]]) -> Any:
    return objects[-1]["spec"]["template"]["spec"]


BREAKING: list[tuple[str, Callable[[list[dict[str, Any]]], Any]]] = [
    ("headless", lambda o: _pod_of(o).update(subdomain="other")),
    ("select", lambda o: o[1]["spec"].update(selector={"app": "x"})),
    ("rendezvous", lambda o: o[-1]["metadata"].update(name="other")),
    ("as many pods", lambda o: o[-1]["spec"].update(parallelism=1)),
    ("replaced alone", lambda o: o[-1]["spec"].update(backoffLimit=3)),
    ("never restarted", lambda o: _pod_of(o).update(restartPolicy="OnFailure")),
    ("no container", lambda o: _pod_of(o)["containers"][0].update(name="main")),
    ("no volume", lambda o: _pod_of(o)["volumes"].pop()),
    ("ConfigMap", lambda o: o[0]["metadata"].update(name="old")),
    ("evicted", lambda o: _pod_of(o)["containers"][0]["resources"]["limits"].update(cpu="1")),
    ("namespace", lambda o: o[0]["metadata"].update(namespace="other")),
]


@pytest.mark.parametrize(("said", "breaks"), BREAKING)
def test_each_disagreement_is_noticed(small, said, breaks):
    objects = copy.deepcopy(kubernetes.objects(small, LEAST))
    breaks(objects)
    assert any(said in line for line in disagreements(objects))


def test_all_that_no_cluster_takes_is_refused_at_once(small):
    options = Options(
        image="a b",
        claim="",
        name="x" * 60,
        form="pod",
        mounts=("data",),
        resources=("memory",),
        secret="No",
        queue="-",
    )
    with pytest.raises(UsageError) as refused:
        kubernetes.objects(small, options)
    for option in (
        "--name",
        "--form",
        "--image",
        "--claim ''",
        "--mount",
        "--resource",
        "--secret",
        "--queue",
    ):
        assert option in str(refused.value)


def test_a_job_file_too_large_for_a_configmap_is_refused(small):
    large = replace(small, plan=small.plan | {"note": "x" * kubernetes._LARGEST_FILE})
    with pytest.raises(UsageError, match="more than a ConfigMap holds"):
        kubernetes.objects(large, LEAST)


@settings(max_examples=60)
@given(name=st.text(max_size=70), mount=st.text(max_size=20), resource=st.text(max_size=20))
def test_hostile_names_are_refused_or_come_through_yaml_as_they_are(small, name, mount, resource):
    options = replace(LEAST, name=name, mounts=(f"data:/{mount}",), resources=(f"memory={resource}",))
    try:
        objects = kubernetes.objects(small, options)
    except UsageError:
        return
    assert read(kubernetes.documents(small, options)) == plain(objects)
    assert re.fullmatch(r"[a-z0-9-]{1,63}", objects[-1]["metadata"]["name"])


def test_a_thousand_nodes_are_one_more_number(wide):
    many = replace(wide, nodes=1024)
    assert len(kubernetes.documents(many, ALL)) < len(kubernetes.documents(wide, ALL)) + 200
