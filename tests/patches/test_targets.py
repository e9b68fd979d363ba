"""Every target of every release can really be wrapped, whatever decorates it, and comes back."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.patches.trees import Release

pytestmark = pytest.mark.processes

SCRIPT = """
import importlib, inspect, sys
from dataclasses import replace
from bundle.patches import patcher, plan as planning
from bundle.patches.catalogue import PATCHES
from bundle.patches.entry import Replacement
from bundle.patches.megatron_core import find_installed_or_default_core
from bundle.patches.plan import build_patch_plan, survey_patches
from bundle.patches.megatron_core import load_review_table
from bundle.environment.packages import detect

class Through(Replacement):
    wrapper = "tests.patches.passthrough:through"

def through(patch):
    return patch._replace(replacements=tuple(Through(*r) for r in patch.replacements))

planning.PATCHES = tuple(through(patch) for patch in PATCHES)
here, table = detect(), load_review_table()
opt_in = {patch.id for patch in PATCHES if patch.opt_in}
# On cpu: without Transformer Engine there is no class of its layers; verify proves those on a GPU.
core = find_installed_or_default_core(here, table)
survey = survey_patches(core, table, here, backend="cpu", requested=opt_in)
plan = build_patch_plan(survey)
targets = [step.target for step in plan.steps]
modules = sorted({target.partition(":")[0] for target in targets})

def raw(target):
    module, _, path = target.partition(":")
    *parents, name = path.split(".")
    owner = sys.modules[module]
    for parent in parents:
        owner = getattr(owner, parent)
    return vars(owner).get(name, "absent")

def depth(target):
    thing, count = raw(target), 0
    thing = getattr(thing, "__func__", thing)
    while getattr(getattr(thing, "__code__", None), "co_filename", "").endswith("passthrough.py"):
        thing, count = thing.__wrapped__, count + 1
    return count

assert not [name for name in sys.modules if name.partition(".")[0] in ("megatron", "torch")]
patcher.apply(plan)
for module in modules:
    importlib.import_module(module)
assert sorted(patcher.list_applied_targets()) == sorted(targets), patcher.list_pending_modules()
lazy = {target: depth(target) for target in targets}
patcher.revert()
assert not any(map(depth, targets))
before = {target: raw(target) for target in targets}
patcher.apply(plan)
assert {target: depth(target) for target in targets} == lazy
patcher.revert()
assert all(raw(target) is before[target] for target in targets)
print(len(targets), "targets")
"""
OLDEST_DEFAULT_NEWEST = ("0.12.3", "0.16.1", "0.19.2")
OTHERS = ("0.13.1", "0.14.0", "0.15.3", "0.17.0", "0.17.1", "0.18.2")


@pytest.mark.parametrize(
    "version",
    [*OLDEST_DEFAULT_NEWEST, *(pytest.param(version, marks=pytest.mark.matrix) for version in OTHERS)],
)
def test_every_target_is_wrapped_and_comes_back(version: str, release: Release):
    if find_spec("torch") is None:
        pytest.skip("could not import 'torch': it is not installed")
    paths = [str(Path.cwd()), str(release(version))]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-c", SCRIPT]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
