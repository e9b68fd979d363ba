"""The objects of a job against Kubernetes' own schemas, and those of the custom resources where they are.

BUNDLE_SCHEMAS names another folder of definitions. That of an AscendJob is in its operator's manifest,
component/ascend-operator/build/ascend-operator.yaml of Ascend/mind-cluster.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from bundle.targets import kubernetes
from tests.targets.kubernetes.jobs import everything, options_of, plain

SCHEMAS = Path(os.environ.get("BUNDLE_SCHEMAS") or Path(__file__).parents[4] / "shared/crds")
DEFINITIONS = {
    "JobSet": "jobset.x-k8s.io_jobsets.yaml",
    "TrainingRuntime": "trainer.kubeflow.org_trainingruntimes.yaml",
    "TrainJob": "trainer.kubeflow.org_trainjobs.yaml",
    "RayJob": "ray.io_rayjobs.yaml",
    "batch.volcano.sh/v1alpha1 Job": "batch.volcano.sh_jobs.yaml",
    "AscendJob": "ascend-operator.yaml",
}
# A mistake in each, of what a schema is there to find.
MISTAKES = [
    ("jobset", ("spec", "failurePolicy", "maxRestart"), 3),
    ("jobset", ("spec", "failurePolicy", "maxRestarts"), "three"),
    ("trainjob", ("spec", "trainer", "numberOfNodes"), 4),
    ("trainjob", ("spec", "runtimeRef", "name"), 4),
    ("volcano", ("spec", "minAvailible"), 4),
    ("volcano", ("spec", "networkTopology", "mode"), "strict"),
    ("rayjob", ("spec", "backoffLimit"), "three"),
    ("rayjob", ("spec", "rayClusterSpec", "authOptions", "mode"), "tokens"),
    ("rayjob", ("spec", "rayClusterSpec", "headGroup"), {}),
    ("ascendjob", ("spec", "runPolicy", "backofLimit"), 3),
    ("ascendjob", ("spec", "runPolicy", "schedulingPolicy", "minAvailable"), "two"),
    ("ascendjob", ("spec", "replicaSpecs", "Master", "template", "spec", "nodeSelectors"), {}),
]


def kind(of: dict[str, Any]) -> str:
    """What an object's schema is called here."""
    own = of["kind"]
    return own if own in DEFINITIONS or "volcano" not in of["apiVersion"] else f"{of['apiVersion']} {own}"


@cache
def check(name: str) -> tuple[str, Any]:
    """The API version and the validator of a custom resource. Skips where its definition is not at hand."""
    jsonschema = pytest.importorskip("jsonschema")
    file = SCHEMAS / DEFINITIONS[name]
    if not file.exists():
        pytest.skip(f"{file.name} is not in {SCHEMAS}")
    documents = YAML(typ="safe").load_all(file)
    (definition,) = (each for each in documents if each and each["kind"] == "CustomResourceDefinition")
    version = next(each for each in definition["spec"]["versions"] if each["storage"])
    validator = jsonschema.Draft202012Validator(closed(version["schema"]["openAPIV3Schema"]))
    return f"{definition['spec']['group']}/{version['name']}", validator


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


def cores(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What of the objects is Kubernetes' own: objects, and the templates of Jobs and pods inside others."""
    found = []
    for each in objects:
        spec, metadata = each.get("spec", {}), {"name": "inner"}
        if each["apiVersion"] in ("v1", "batch/v1"):
            found.append(each)
        for replicated in spec.get("replicatedJobs") or spec.get("template", {}).get("spec", {}).get(
            "replicatedJobs", []
        ):
            inner = replicated["template"]
            found.append(
                {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": inner["spec"]}
            )
        ray = spec.get("rayClusterSpec")
        for template in [
            *(task["template"] for task in spec.get("tasks", ())),
            *(replica["template"] for replica in spec.get("replicaSpecs", {}).values()),
            *([spec["submitterPodTemplate"], ray["headGroupSpec"]["template"]] if ray else ()),
            *(group["template"] for group in (ray["workerGroupSpecs"] if ray else ())),
        ]:
            found.append(
                {"apiVersion": "v1", "kind": "Pod", "metadata": metadata | template["metadata"]}
                | {"spec": template["spec"]}
            )
    return found


@pytest.mark.parametrize("version", ["1.29.0", "1.37.0"])
def test_kubernetes_takes_what_is_its_own(jobs, version):
    validator = pytest.importorskip("kubernetes_validate")
    for job in jobs:
        for options in options_of(job):
            own = cores(kubernetes.build_objects(job, options))
            assert len(own) >= 2, options.form
            for each in own:
                validator.validate(plain(each), version, strict=True)


@pytest.mark.parametrize("form", ["jobset", "trainjob", "volcano", "rayjob", "ascendjob"])
def test_the_custom_resources_are_as_their_definitions_say(jobs, form):
    checked = 0
    for job in jobs:
        for options in (options for options in options_of(job) if options.form == form):
            for each in kubernetes.build_objects(job, options):
                if kind(each) in DEFINITIONS:
                    version, validator = check(kind(each))
                    assert each["apiVersion"] == version
                    assert [error.message for error in validator.iter_errors(plain(each))] == []
                    checked += 1
    takers = [job for job in jobs if form != "ascendjob" or job.backend == "ascend"]
    assert checked >= len(takers) * 2, "of each job all options, and the least"


@pytest.mark.parametrize(("form", "path", "value"), MISTAKES)
def test_a_mistake_is_found(wide, npus, form, path, value):
    job = npus if form == "ascendjob" else wide
    workload = plain(kubernetes.build_objects(job, everything(form))[-1])
    _, validator = check(kind(workload))
    inside = workload
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    assert list(validator.iter_errors(workload))
