"""What bake itself makes of the two files; docker-bake.json is the one place of versions."""

import dataclasses
import json

import pytest

from tests.tools.images.checkouts import ROOT, change, copied

pytestmark = pytest.mark.images


def bake(engine, root, *words, **variables):
    engine = dataclasses.replace(engine, environment={**engine.environment, **variables})
    files = (f"--file={root}/docker-bake.json", f"--file={root}/docker-bake.hcl")
    return engine.attempt("buildx", "bake", *files, "--print", *words)


def printed(engine, root, *words, **variables):
    result = bake(engine, root, *words, **variables)
    assert result.code == 0, result.err
    return json.loads(result.out)


def in_order(plan):
    """With the targets of each group sorted: bake names those of a matrix in any order."""
    for group in plan["group"].values():
        group["targets"].sort()
    return plan


def test_the_plan_is_the_golden_one(engine):
    """`docker buildx bake --print all > tests/tools/images/bake.json` writes it."""
    golden = json.loads((ROOT / "tests/tools/images/bake.json").read_text())
    assert in_order(printed(engine, ROOT, "all")) == in_order(golden)


def test_one_version_changes_what_bake_builds(engine, tmp_path):
    root = copied(tmp_path / "copy")
    before = printed(engine, root, "all")["target"]
    change(root, "STACKS", "ascend-mcore0.16", "pins", "torch", "version", value="2.10.1")
    after = printed(engine, root, "all")["target"]
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"ascend-a2-mcore0-16", "ascend-a3-mcore0-16"}
    for name in changed:
        assert "torch==2.10.1" in after[name]["labels"]["mcore-bundle.versions"]
        assert all("-torch2.10.1-" in tag for tag in after[name]["tags"])


def test_ci_builds_for_every_platform_and_attests(engine):
    plan = printed(engine, ROOT, "all", CI="true", CACHE="registry.example/cache")
    for name, target in plan["target"].items():
        assert target["platforms"] == ["linux/amd64", "linux/arm64"]
        assert target["cache-to"], name
        assert {entry["type"] for entry in target.get("attest", [])} == (
            {"provenance", "sbom"} if target.get("tags") else set()
        )


def test_inputs_become_labels(engine):
    target = printed(engine, ROOT, "cpu", INPUTS=json.dumps({"cpu": "sha256:1"}))["target"]["cpu"]
    assert target["labels"]["mcore-bundle.inputs"] == target["args"]["INPUTS"] == "sha256:1"


def test_a_fabric_that_is_none_is_refused(engine):
    result = bake(engine, ROOT, FABRIC="token-ring")
    assert result.code != 0
    assert "FABRIC" in result.err
