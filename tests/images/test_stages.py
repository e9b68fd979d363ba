"""Stages of the GPU and NPU Dockerfiles that need no real base, on a stand-in, from their real locks."""

import pytest

from tests.images import baking

pytestmark = pytest.mark.images

# What needs neither a driver nor what nvcc compiles: not flash-attn, nor Transformer Engine's extension for
# torch, without which megatron.core does not import beside the rest of Transformer Engine.
IMPORTS = (
    "torch.distributed, transformer_engine, transformers, sglang, safetensors, pyarrow, triton, tensorboard"
)


def stage(whole: baking.Target, name: str) -> baking.Target:
    """One stage of a target, without what only other stages take from elsewhere."""
    return whole | {"target": name, "contexts": {}}


def then(before: baking.Target, command: str) -> baking.Target:
    """A target that runs `command` on top of what the target `before` made."""
    kept = {key: before[key] for key in ("context", "network", "output") if key in before}
    return kept | {
        "dockerfile-inline": f"FROM before\nRUN {command}\n",
        "contexts": {"before": "target:before"},
    }


def test_the_cuda_lock_installs_on_a_stand_in_and_imports_without_a_driver(engine, target, tmp_path):
    deps = stage(target("cuda-mcore0-16"), "deps")
    imports = then(deps, f"python -c 'import torch, {IMPORTS}; print(torch.version.cuda)'")
    said = baking.build(engine, tmp_path, {"before": deps, "imports": imports}, seconds=3600)
    assert " 13.0\n" in said


@pytest.mark.parametrize(
    ("name", "what"),
    [("cuda-mcore0-16", "fabric-none"), ("cuda-mcore0-16", "fabric-ib"), ("ascend-a2", "base")],
)
def test_a_stage_of_system_packages_builds_on_a_stand_in(engine, target, tmp_path, name, what):
    baking.build(engine, tmp_path, {name: stage(target(name), what)})
