"""Every patch that a release needs is proven there; the command says so."""

import json
import os
import subprocess
import sys
from importlib.metadata import version as installed_version

import pytest

from bundle.environment.compatibility import Combination
from bundle.errors import UsageError
from bundle.patches.catalogue import PATCHES
from bundle.verification import decide_patches, list_needed_patches, verify
from bundle.verification.check import CHECKS_BY_PATCH_ID, Status
from tests.command import run_bundle


def not_proven(results):
    return {result.patch: result.reason for result in results if result.status is not Status.PROVEN}


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return run_bundle("patches", "verify", *args)


def test_every_patch_has_a_check_and_every_check_a_patch():
    assert {patch.id for patch in PATCHES} == set(CHECKS_BY_PATCH_ID)


def test_an_unknown_patch_is_a_usage_error(messages):
    name = "mtp-zero-layers"
    with pytest.raises(UsageError, match=name) as error:
        verify("cpu", [name.removesuffix("s")])
    messages(error.value)


@pytest.mark.world
@pytest.mark.slow
def test_default_release():
    pytest.importorskip("megatron.core")
    results = list(verify("cpu"))
    assert len(results) >= 8
    assert not not_proven(results)


@pytest.mark.world
def test_what_is_not_patched_and_what_takes_too_many_devices_is_not_provable():
    pytest.importorskip("megatron.core")
    patches = list_needed_patches(decide_patches("cpu"))
    several = next(patch.id for patch in patches if CHECKS_BY_PATCH_ID[patch.id].world > 1)
    results = list(verify("cpu", [several, "mla-packed-qkv"], devices=1))
    assert {result.patch: result.status for result in results} == {
        several: Status.NOT_PROVABLE,
        "mla-packed-qkv": Status.NOT_PROVABLE,
    }


@pytest.mark.world
def test_the_command_proves_and_prints_json():
    pytest.importorskip("megatron.core")
    result = run("recompute-reclaim", "--backend", "cpu", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["schema"], report["backend"], report["device"]) == (1, "cpu", "cpu")
    assert [(row["id"], row["status"]) for row in report["results"]] == [("recompute-reclaim", "proven")]
    seen = Combination.model_validate_json(json.dumps(report["combination"]))
    assert seen.proven == ("patches recompute-reclaim",) and seen.packages["torch"] == installed_version(
        "torch"
    )


@pytest.mark.world
def test_a_failed_check_ends_the_command_with_the_code_of_patches(tmp_path):
    """A wrapper that does nothing: the defect is still there with it."""
    pytest.importorskip("megatron.core")
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'bundle.verification.rank' in sys.orig_argv:\n"
        "    import bundle.replacements.moe as r\n"
        "    r.detach_dispatcher_tensors = lambda original: original\n"
    )
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    words = ("patches", "verify", "recompute-reclaim", "--backend", "cpu")
    result = run_bundle(*words, code=4, environment=environment)
    assert "failed" in result.stdout


@pytest.mark.matrix
@pytest.mark.world
def test_every_release(release_trees, proven):
    wrong = {}
    for version, tree in release_trees.items():
        if found := not_proven(verify("cpu", tree=tree)):
            wrong[version] = found
        proven("every patch that the release needs", core=version)
    assert not wrong
