"""Tiny models on emulated NPUs, against the same layouts on the cpu."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bundle.environment.compatibility import EMULATED
from tests.matrix.test_layouts import newest_of_each_minor
from tests.npu.child import emulated
from tests.npu.emulation import plugin
from tests.npu.training import CASES
from tests.world import BACKEND, World

pytestmark = pytest.mark.npu

# megatron-core 0.12 does not train MTP under tp2 (the trap mtp-tensor-parallel)
EVERYWHERE = ("dense packed tp2", "latent pp2", "latent cp2", "latent ep2")
SAME, BF16 = 1e-6, 5e-4  # relative


def worlds(plugins: Path, tree: Path | None = None) -> tuple[World, World]:
    """Ranks on emulated NPUs and on the cpu, in environments that have the same torch."""
    npus = World(tree, megatron=True, environ={BACKEND: "ascend", **emulated(str(plugins))})
    return npus, World(tree, megatron=True, environ={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})


@pytest.fixture(scope="module")
def plugins(tmp_path_factory):
    return plugin(tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "two ranks"])
def seen(request, plugins):
    """Both backends' answers to all cases of so many ranks."""
    names = [case.name for case in CASES if case.ranks == request.param]
    return names, *trained(names, request.param, plugins)


def trained(names: Sequence[str], ranks: int, plugins: Path, tree: Path | None = None) -> list[Any]:
    """What the cases come to on emulated NPUs and on the cpu."""
    answers = []
    for world in worlds(plugins, tree):
        with world:
            out = world.run("tests.npu.training", ranks, *names, timeout=1800)
            answers.append(json.loads(out[0].splitlines()[-1]))
    return answers


def compare(names: Sequence[str], npu: Any, cpu: Any) -> None:
    """The losses and gradient norms of every step are the cpu's."""
    for name in names:
        bound = BF16 if "bf16" in name else SAME
        for ours, theirs in zip(npu["losses"][name], cpu["losses"][name], strict=True):
            assert ours == pytest.approx(theirs, rel=bound), name


def test_losses_and_gradient_norms_are_the_cpus(seen, proven):
    compare(*seen)
    proven("tiny models train with the losses of the cpu", backend="ascend", device=EMULATED)


def test_the_operators_of_torch_npu_were_called_where_they_were_asked_for(seen):
    names, npu, cpu = seen
    assert not any(cpu["operators"].values())
    everywhere = {
        f"npu_{name}{end}" for name in ("swiglu", "rms_norm", "rotary_mul") for end in ("", "_backward")
    }
    everywhere.add("_fused_adamw_")
    permuted = ("npu_moe_token_permute_with_routing_map", "npu_moe_token_unpermute_with_routing_map")
    experts = {"npu_grouped_matmul", permuted[0], f"_{permuted[1]}", *(f"{name}_grad" for name in permuted)}
    attention = {"npu_fusion_attention", "npu_fusion_attention_grad"}
    for name in names:
        asked = "without operators" not in name
        wanted = everywhere | (experts if "latent" in name else set()) if asked else set()
        wanted |= attention if "unfused" not in name else set()
        assert set(npu["operators"][name]) == wanted, name


@pytest.mark.parametrize("which", [0, -1], ids=["oldest", "newest"])
def test_the_oldest_and_the_newest_minor(release_trees, which, plugins, proven):
    version = newest_of_each_minor(release_trees)[which]
    if which and importlib.util.find_spec("triton") is None:
        pytest.skip(f"megatron-core {version} imports triton, which is not installed")
    compare(EVERYWHERE, *trained(EVERYWHERE, 2, plugins, release_trees[version]))
    proven("tiny models train with the losses of the cpu", core=version, backend="ascend", device=EMULATED)
