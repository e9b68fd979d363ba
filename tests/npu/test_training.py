"""Tiny models on emulated NPUs, against the same layouts on the cpu."""

import json
from pathlib import Path

import pytest

from bundle.environment.compatibility import EMULATED
from tests.npu.child import emulated
from tests.npu.emulation import plugin
from tests.npu.training import CASES
from tests.world import BACKEND, World

pytestmark = pytest.mark.npu

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
    answers = []
    for world in worlds(plugins):
        with world:
            out = world.run("tests.npu.training", request.param, *names, timeout=1800)
            answers.append(json.loads(out[0].splitlines()[-1]))
    return names, *answers


def test_losses_and_gradient_norms_are_the_cpus(seen, proven):
    names, npu, cpu = seen
    for name in names:
        bound = BF16 if "bf16" in name else SAME
        for ours, theirs in zip(npu["losses"][name], cpu["losses"][name], strict=True):
            assert ours == pytest.approx(theirs, rel=bound), name
    proven("tiny models train with the losses of the cpu", backend="ascend", device=EMULATED)


def test_the_operators_of_torch_npu_were_called(seen):
    _, npu, cpu = seen
    assert not cpu["operators"]
    assert {name for name, count in npu["operators"].items() if count} >= {
        "npu_fusion_attention",
        "npu_fusion_attention_grad",
        "npu_rms_norm",
        "npu_rms_norm_backward",
    }
