"""Stages of the GPU and NPU Dockerfiles that need no real base, on a stand-in, from their real locks."""

import pytest

from tests.images import baking

pytestmark = pytest.mark.images

# What no compiler and no driver is needed for: all but flash-attn and Transformer Engine's extension for torch.
IMPORTS = "torch, torch.distributed, megatron.core, transformers, safetensors, pyarrow, triton, tensorboard"


def stage(target: baking.Target, name: str) -> baking.Target:
    """One stage of a target, without what only other stages take from elsewhere."""
    return target | {"target": name, "contexts": {}}


def then(target: baking.Target, command: str) -> baking.Target:
    """A target that runs `command` on top of what the target `before` made."""
    kept = {key: target[key] for key in ("context", "network", "output") if key in target}
    return kept | {"dockerfile-inline": f"FROM before\nRUN {command}\n", "contexts": {"before": "target:before"}}


@pytest.mark.parametrize("name", ["cuda-mcore0-16", "cuda-mcore0-19"])
def test_the_cuda_lock_installs_on_a_stand_in_and_imports_without_a_driver(engine, targets, tmp_path, name):
    deps = stage(targets[name], "deps")
    imports = then(deps, f"python -c 'import {IMPORTS}; print(torch.version.cuda)'")
    said = baking.build(engine, tmp_path, {"before": deps, "imports": imports}, seconds=3600)
    assert " 13.0\n" in said
