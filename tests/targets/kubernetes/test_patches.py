"""`--patch FILE`: what it merges into the objects of each form, and what it may not change."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bundle.errors import UsageError
from bundle.targets import kubernetes
from tests.targets.kubernetes.jobs import LEAST, pods

POD = """\
kind: Pod
spec:
  hostNetwork: true
  restartPolicy: null
  containers:
    - name: CONTAINER
      env: [{name: NCCL_IB_HCA, value: mlx5_1}]
    - {name: sidecar, image: "logs:1"}
  dnsConfig: {searches: [a, b]}
"""


def patched(job: Any, form: str, path: Path, text: str) -> list[dict[str, Any]]:
    path.write_text(text)
    return kubernetes.build_objects(job, replace(LEAST, form=form, patch=path, name="sft"))


@pytest.mark.parametrize("form", [form for form in kubernetes.FORMS_BY_NAME if form != "rayjob"])
def test_a_patch_of_pods_reaches_every_template(npus, form, tmp_path):
    before = kubernetes.build_objects(npus, replace(LEAST, form=form, name="sft"))
    container = pods(before)[0][1]["spec"]["containers"][0]["name"]
    after = patched(npus, form, tmp_path / "patch.yaml", POD.replace("CONTAINER", container))
    for (_, old), (_, new) in zip(pods(before), pods(after), strict=True):
        node, sidecar = new["spec"]["containers"]
        (first,) = old["spec"]["containers"]
        assert node["env"] == [*first["env"], {"name": "NCCL_IB_HCA", "value": "mlx5_1"}]
        assert {key: node[key] for key in first if key != "env"} == {
            key: value for key, value in first.items() if key != "env"
        }
        assert sidecar == {"name": "sidecar", "image": "logs:1"}
        assert new["spec"]["hostNetwork"] is True and "restartPolicy" not in new["spec"]
        assert new["spec"]["dnsConfig"] == {"searches": ["a", "b"]}
        assert new["spec"]["volumes"] == old["spec"]["volumes"]


def test_a_patch_changes_the_objects_of_its_kind_alone(small, tmp_path):
    text = (
        "kind: Job\nspec: {backoffLimit: 3}\nmetadata: {labels: {x: '1'}}\n---\nkind: Service\nspec: {a: 1}\n"
    )
    plain = kubernetes.build_objects(small, replace(LEAST, form="job", name="sft"))
    file, service, job = patched(small, "job", tmp_path / "patch.yaml", text)
    assert file == plain[0]
    assert service["spec"] == plain[1]["spec"] | {"a": 1}
    assert job["spec"] == plain[2]["spec"] | {"backoffLimit": 3}
    assert job["metadata"]["labels"] == plain[2]["metadata"]["labels"] | {"x": "1"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("kind: JobSet\n", "kind JobSet"),
        ("kind: Job\nmetadata: {name: other}\n", "kind Job"),
        ("kind: Job\nmetadata: {labels: {app.kubernetes.io/instance: x}}\n", "kind Job"),
        ("kind: Job\nmetadata: null\n", "kind Job"),
        ("spec: {}\n", "kind"),
        ("[1, 2]\n", "kind"),
        ("", "kind"),
        ("kind: [\n", "YAML"),
        ("kind: !!python/name:os.system x\n", "YAML"),
    ],
)
def test_a_patch_that_fits_no_object_or_takes_its_identity_is_refused(small, tmp_path, text, value, messages):
    with pytest.raises(UsageError, match="--patch") as refused:
        patched(small, "job", tmp_path / "patch.yaml", text)
    assert value in str(refused.value)
    if "YAML" not in value:
        messages(refused.value)


def test_a_patch_that_cannot_be_read_is_named(small, tmp_path):
    with pytest.raises(UsageError, match=r"--patch .*none\.yaml"):
        kubernetes.build_objects(small, replace(LEAST, patch=tmp_path / "none.yaml"))
