"""Real models train in FP8: every product of every layer that Transformer Engine would multiply in FP8."""

import json
from typing import Any

import pytest

from tests import world

SCALINGS = ("delayed", "tensorwise", "blockwise", "mxfp8")
MODELS = ("dense", "latent")
MICRO_BATCHES, STEPS = 2, 2

# Layers with an FP8 product. dense: 2 x (qkv, proj, fc1, fc2). latent: attention has 5 in each of its three
# layers, the MTP layer's included; one dense MLP, two of four experts and a shared one; the MTP projection.
LAYERS = {"dense": 2 * 4, "latent": 3 * 5 + 2 + 2 * (4 + 1) * 2 + 1}

Seen = dict[str, dict[str, Any]]


def train(size: int, *cases: str, **environ: str) -> Seen:
    """What the rank 0 of `size` saw in each case: losses of each step, operands rounded by dtype."""
    printed = world.run("tests.backends.cpu.fp8.training", size, *cases, timeout=280, environ=environ)
    seen: Seen = json.loads(printed[0].splitlines()[-1])
    return seen


@pytest.fixture(scope="module")
def alone() -> Seen:
    pytest.importorskip("megatron.core")
    cases = [f"{model} {scaling}" for model in MODELS for scaling in ("bf16", *SCALINGS)]
    return train(1, *cases, "dense delayed full", "latent tensorwise full")


@pytest.mark.world
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("model", MODELS)
def test_fp8_trains_beside_bf16_and_is_not_it(alone, model, scaling):
    fp8, bf16 = (alone[f"{model} {name}"]["losses"] for name in (scaling, "bf16"))
    assert fp8 != bf16
    for ours, theirs in zip(fp8, bf16, strict=True):
        assert ours[:-1] == pytest.approx(theirs[:-1], abs=0.01)  # losses; seen up to 0.002
        assert ours[-1] == pytest.approx(theirs[-1], rel=0.02)  # the gradient norm; seen up to 0.002
    assert all(after < before for before, after in zip(fp8[0], fp8[1], strict=True))


@pytest.mark.world
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("model", MODELS)
def test_every_product_takes_rounded_operands(alone, model, scaling):
    """Two operands forward, four backward: the gradient of the output is in two products."""
    products = LAYERS[model] * MICRO_BATCHES * STEPS
    hybrid = scaling in ("delayed", "tensorwise")
    wanted = {"e4m3fn": 4 * products, "e5m2": 2 * products} if hybrid else {"e4m3fn": 6 * products}
    assert alone[f"{model} {scaling}"]["casts"] == wanted
    assert alone[f"{model} bf16"]["casts"] == {}


@pytest.mark.world
@pytest.mark.parametrize("case", ["dense delayed", "latent tensorwise"])
def test_recomputation_changes_nothing(alone, case):
    again = alone[f"{case} full"]
    assert again["losses"] == alone[case]["losses"]
    assert again["casts"]["e4m3fn"] > alone[case]["casts"]["e4m3fn"]


@pytest.mark.world
def test_ranks_that_share_a_sequence_train_alike(alone):
    """Blocks and shared scales are cut alike; what differs is the order of bf16 sums, seen through FP8."""
    cases = ("dense delayed", "dense tensorwise", "latent blockwise")
    together = train(2, *(f"{case} tp2" for case in cases))
    for case in cases:
        for ours, one in zip(together[f"{case} tp2"]["losses"], alone[case]["losses"], strict=True):
            assert ours[:-1] == pytest.approx(one[:-1], abs=0.01)
            assert ours[-1] == pytest.approx(one[-1], rel=0.02)
