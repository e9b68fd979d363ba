from pathlib import Path

from ruamel.yaml import YAML

from bundle.targets.kubernetes import FORMS_BY_NAME
from tools.kubernetes import FOLDER, files

HERE = Path(__file__).parents[2] / FOLDER


def test_the_examples_are_made_of_the_demo():
    written = {file.name: file.read_text() for file in HERE.iterdir()}
    assert written == dict(files()), "run: python -m tools.kubernetes"
    assert {f"{form}.yaml" for form in FORMS_BY_NAME} < set(written)


def test_the_base_makes_the_config_map_that_its_objects_mount():
    yaml = YAML(typ="safe")
    base = yaml.load(HERE / "kustomization.yaml")
    (made,) = base["configMapGenerator"]
    assert made["files"] == ["job.json"] and made["options"]["disableNameSuffixHash"]
    (resource,) = base["resources"]
    (workload,) = yaml.load_all((HERE / resource).read_text())
    (replicated,) = workload["spec"]["replicatedJobs"]
    volumes = replicated["template"]["spec"]["template"]["spec"]["volumes"]
    assert {volume["name"]: volume.get("configMap") for volume in volumes}["job"] == {"name": made["name"]}
