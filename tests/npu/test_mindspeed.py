"""MindSpeed in our jobs, over emulated NPUs: what it replaces there, that models train, and what is refused.

$MINDSPEED names a clone of MindSpeed that has the heads of its branches (it is on no package index);
$BUNDLE_RELEASES has megatron-core 0.15.3 and 0.16.1. The branch for 0.12 imports megatron.training, which no
release of the package megatron-core has: $MEGATRON_HISTORY names a clone of Megatron-LM with the tag
core_v0.12.1. torch-npu 2.13 stands under branches that are documented for 2.7.1.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bundle.environment.compatibility import EMULATED_ACCELERATOR
from bundle.patches import mindspeed
from tests.npu.child import Ended, emulated, ended
from tests.npu.emulation import plugin
from tests.npu.test_job import SMALL
from tests.npu.test_training import compare
from tests.world import BACKEND, World

pytestmark = pytest.mark.npu

RELEASES = {"core_r0.15.3": "0.15.3", "core_r0.16.0": "0.16.1"}
# In groups, since the layers of core_r0.16.0 keep the first tensor-parallel group of a process.
CASES = {
    "alone": ("dense", "dense packed", "dense bf16", "latent bf16"),
    "tp2": ("dense packed tp2", "latent bf16 tp2"),
    "cp2, pp2": ("dense packed cp2, recomputed", "latent bf16 pp2"),
}
# 0.12 does not train multi-token prediction under tp2, and there is no other model with latent attention.
LATER = ("latent bf16 tp2",)
WITHOUT_FIRST = """
from dataclasses import replace
from bundle import backends
from tests.npu.training import CASES
backends.set_up_runtime("ascend")
backends.set_up_runtime("ascend", replace(CASES[0], mindspeed=True).recipe())
"""


class Trees(NamedTuple):
    """A branch of MindSpeed, and the tree of its megatron-core."""

    branch: mindspeed.MindSpeedBranch
    adaptor: Path
    megatron: Path


def checked_out(clone: str, commit: str, directory: Path) -> Path:
    """The files of a commit, as a clone that knows its commit."""
    for command in (
        ["clone", "--quiet", "--shared", "--no-checkout", clone, str(directory)],
        ["-C", str(directory), "checkout", "--quiet", "--detach", commit],
    ):
        ended = subprocess.run(["git", *command], capture_output=True, text=True)
        if ended.returncode:
            pytest.skip(f"{clone} has no {commit}: {ended.stderr.strip()[-200:]}")
    return directory


@pytest.fixture(scope="module", params=[of.branch for of in mindspeed.SUPPORTED_TRAINING_BRANCHES])
def trees(request, tmp_path_factory):
    clone, megatrons = os.environ.get("MINDSPEED"), os.environ.get("MEGATRON_HISTORY")
    if not clone:
        pytest.skip("MINDSPEED names no clone of MindSpeed")
    branch = next(of for of in mindspeed.SUPPORTED_TRAINING_BRANCHES if of.branch == request.param)
    if version := RELEASES.get(branch.branch):
        megatron = Path(os.environ.get("BUNDLE_RELEASES", ""), version)
        if not megatron.is_dir():
            pytest.skip(f"megatron-core {version} is not under BUNDLE_RELEASES")
    elif megatrons:
        megatron = checked_out(megatrons, "core_v0.12.1", tmp_path_factory.mktemp("megatron"))
    else:
        pytest.skip("MEGATRON_HISTORY names no clone of Megatron-LM, whose megatron.training it imports")
    return Trees(branch, checked_out(clone, branch.commit, tmp_path_factory.mktemp("mindspeed")), megatron)


@pytest.fixture(scope="module")
def plugins(tmp_path_factory):
    return plugin(tmp_path_factory.mktemp("plugin"))


def variables(trees: Trees, plugins: Path) -> dict[str, str]:
    """Of a process on emulated NPUs that can import both trees."""
    found = emulated(str(plugins))
    path = [str(trees.adaptor), str(trees.megatron), found["PYTHONPATH"]]
    triton = {"STAND_IN_TRITON": "1"} if trees.branch.imports == "triton" else {}
    return found | triton | {"PYTHONPATH": os.pathsep.join(path)}


def python(trees: Trees, plugins: Path, *words: str, **more: str) -> Ended:
    return ended(words, os.environ | variables(trees, plugins) | more)


@pytest.fixture(scope="module")
def adapted(trees, plugins):
    """What a process of a job through MindSpeed says."""
    found = python(trees, plugins, "-m", "tests.npu.adapting")
    assert found.code == 0, found.err[-4000:]
    return json.loads(found.out.splitlines()[-1])


def test_it_replaces_of_our_targets_what_the_list_says_and_no_more(trees, adapted):
    assert adapted["owned"] == sorted(trees.branch.replaces)


def test_the_command_line_and_the_log_of_a_rank_stay_its_own(adapted):
    assert adapted["unchanged"] is True


def test_what_a_process_cannot_be_is_refused(adapted):
    assert "Ascend950" in adapted["fp8"] and "a2" in adapted["fp8"]
    assert adapted["another job"].startswith("MindSpeed ")
    assert "mindspeed.megatron_adaptor" in adapted["without"]


def test_it_is_not_imported_behind_megatron(trees, plugins):
    found = python(trees, plugins, "-c", WITHOUT_FIRST)
    assert found.code and "MindSpeed" in found.err.splitlines()[-1]


def through(trees: Trees, plugins: Path, module: str, ranks: int, *words: str) -> Any:
    """What rank 0 of a module found through MindSpeed."""
    environ = variables(trees, plugins) | {BACKEND: "ascend"}
    with World(trees.megatron, environ=environ) as world:
        return json.loads(world.run(module, ranks, *words, timeout=1800)[0].splitlines()[-1])


def test_a_run_goes_on_from_its_checkpoint(trees, plugins, tmp_path):
    whole, rest = through(trees, plugins, "tests.npu.continuing", 1, str(tmp_path))
    assert len(whole) == 3 and rest == [pytest.approx(whole[2], rel=1e-6)]


def test_a_job_goes_through_it_by_the_command_line(trees, plugins, tmp_path):
    sets = (*SMALL, "backend_options.mindspeed=true", "model.dtype=bf16", "parallel.ep=1")
    words = [word for each in sets for word in ("--set", each)]
    command = ["train", "demo", "--backend", "ascend", "--run-directory", str(tmp_path / "run"), *words]
    found = python(trees, plugins, "-m", "tests.npu.machine", *command, ASCEND_RT_VISIBLE_DEVICES="0")
    assert found.code == 0, found.err[-4000:]
    assert "mindspeed.megatron_adaptor" in found.out + found.err  # it says that it patches
    job = json.loads((tmp_path / "run/job.json").read_text())
    assert job["recipe"]["backend_options"] == {"mindspeed": True}


@pytest.fixture(scope="module", params=sorted(CASES))
def seen(request, trees, plugins):
    """Answers to the cases of so many ranks, through MindSpeed and on the cpu."""
    ranks, first = 1 if request.param == "alone" else 2, trees.branch.imports == "megatron.training"
    names = [name for name in CASES[request.param] if not (first and name in LATER)]
    ours = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    with World(trees.megatron, megatron=True, environ=ours) as world:
        out = world.run("tests.npu.training", ranks, *names, timeout=1800)
    return (
        names,
        through(trees, plugins, "tests.npu.training", ranks, "mindspeed", *names),
        json.loads(out[0].splitlines()[-1]),
    )


def test_models_train_through_it_with_the_losses_of_the_cpu(seen, trees, proven):
    compare(*seen)
    version = RELEASES.get(trees.branch.branch, "0.12.1")
    line = f"tiny models train through MindSpeed {trees.branch.branch} with the losses of the cpu"
    proven(line, core=version, backend="ascend", device=EMULATED_ACCELERATOR)


def test_torch_npus_operators_were_called(seen):
    names, npu, _ = seen
    everywhere = {
        f"npu_{name}{end}" for name in ("swiglu", "rms_norm", "rotary_mul") for end in ("", "_backward")
    }
    everywhere |= {"_fused_adamw_", "npu_fusion_attention", "npu_fusion_attention_grad"}
    for name in names:
        called = set(npu["operators"][name])
        assert called >= everywhere, name
        assert ("npu_grouped_matmul" in called) == ("latent" in name), name
