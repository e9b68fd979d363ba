"""Real models train in FP8: every product of every layer that Transformer Engine would multiply in FP8."""

import json
from typing import Any

import pytest

from tests.world import Core

CASES = (
    *(f"dense {scaling}" for scaling in ("delayed", "tensorwise", "blockwise", "mxfp8")),
    "latent tensorwise",
    "latent blockwise",
)
ADAPTED = ("dense tensorwise", "dense mxfp8", "latent blockwise")
MICRO_BATCHES, STEPS = 2, 2

# Layers with an FP8 product. dense: 2 x (qkv, proj, fc1, fc2). latent: attention has 5 in each of its three
# layers, the MTP layer's included; one dense MLP, two of four experts and a shared one; the MTP projection.
LAYERS = {"dense": 2 * 4, "latent": 3 * 5 + 2 + 2 * (4 + 1) * 2 + 1}

Seen = dict[str, dict[str, Any]]


def train(core: Core, size: int, *cases: str) -> Seen:
    """What the rank 0 of `size` saw in each case: losses of each step, operands rounded by dtype."""
    printed = core.world.run("tests.backends.cpu.fp8.training", size, *cases, timeout=280)
    seen: Seen = json.loads(printed[0].splitlines()[-1])
    return seen


@pytest.fixture(scope="module")
def alone(installed: Core) -> Seen:
    full = ("dense delayed full", "latent tensorwise full")
    adapted = (f"{case} adapters" for case in ("dense bf16", "latent bf16", *ADAPTED))
    packed = ("dense bf16 packed", "dense mxfp8 packed", "dense mxfp8 packed unpadded")
    return train(installed, 1, "dense bf16", "latent bf16", *CASES, *full, *adapted, *packed)


def close(seen: list[list[float]], reference: list[list[float]]) -> None:
    """Losses within 0.01 (seen: 0.002), gradient norms within 2 % (seen: 0.2 %)."""
    for ours, theirs in zip(seen, reference, strict=True):
        assert ours[:-1] == pytest.approx(theirs[:-1], abs=0.01)
        assert ours[-1] == pytest.approx(theirs[-1], rel=0.02)


def rounded(case: str) -> dict[str, int]:
    """Operands by dtype: two a product's layer forward, four backward, where the gradient counts twice."""
    model, scaling = case.split()
    layers = LAYERS[model] * MICRO_BATCHES * STEPS
    hybrid = scaling in ("delayed", "tensorwise")
    return {"e4m3fn": 4 * layers, "e5m2": 2 * layers} if hybrid else {"e4m3fn": 6 * layers}


@pytest.mark.world
def test_all_micro_batches_of_a_step_multiply_by_one_copy_of_a_weight(alone):
    layers = alone["dense delayed"]["weight_scales"]
    assert len(layers) == LAYERS["dense"]
    for scales in layers:
        steps = [scales[at : at + MICRO_BATCHES] for at in range(0, len(scales), MICRO_BATCHES)]
        assert [len(set(step)) for step in steps] == [1] * STEPS
        assert steps[0][0] == 1 < steps[1][0]


@pytest.mark.world
@pytest.mark.parametrize("case", CASES)
def test_fp8_trains_beside_bf16_and_is_not_it(alone, case):
    fp8, bf16 = (alone[name]["losses"] for name in (case, f"{case.split()[0]} bf16"))
    assert fp8 != bf16
    close(fp8, bf16)
    assert all(after < before for before, after in zip(*fp8, strict=True))


@pytest.mark.world
@pytest.mark.parametrize("case", CASES)
def test_every_product_takes_rounded_operands(alone, case):
    assert alone[case]["casts"] == rounded(case)
    assert alone[f"{case.split()[0]} bf16"]["casts"] == {}


@pytest.mark.world
@pytest.mark.parametrize("case", ADAPTED)
def test_adapters_train_beside_frozen_products_in_fp8(alone, case):
    """A frozen weight has no product for its gradient, which would take two more operands."""
    fp8, bf16 = (alone[f"{name} adapters"] for name in (case, f"{case.split()[0]} bf16"))
    assert fp8["losses"] != bf16["losses"]
    close(fp8["losses"], bf16["losses"])
    assert bf16["casts"] == {}
    whole = rounded(case)
    frozen = {"e4m3fn": whole["e4m3fn"] * 3 // 4, "e5m2": whole.get("e5m2", 0) // 2}
    if "e5m2" not in whole:
        frozen = {"e4m3fn": whole["e4m3fn"] * 2 // 3}
    assert fp8["casts"] == frozen


@pytest.mark.world
@pytest.mark.parametrize("case", ["dense delayed", "latent tensorwise"])
def test_recomputation_changes_nothing(alone, case):
    again = alone[f"{case} full"]
    assert again["losses"] == alone[case]["losses"]
    assert again["casts"]["e4m3fn"] > alone[case]["casts"]["e4m3fn"]


@pytest.mark.world
def test_packs_train_padded_and_are_refused_without(alone):
    close(alone["dense mxfp8 packed"]["losses"], alone["dense bf16 packed"]["losses"])
    assert alone["dense mxfp8 packed"]["losses"] != alone["dense bf16 packed"]["losses"]
    (refused,) = alone["dense mxfp8 packed unpadded"]["refused"]
    assert refused.startswith("43 rows") and "recipe.alignment" in refused


@pytest.mark.world
def test_ranks_that_share_a_sequence_train_alike(alone, installed):
    """Blocks and shared scales are cut alike; what differs is the order of bf16 sums, seen through FP8."""
    cases = ("dense delayed", "latent blockwise", "dense tensorwise adapters")
    together = train(installed, 2, *(f"{case} tp2" for case in cases))
    for case in cases:
        close(together[f"{case} tp2"]["losses"], alone[case]["losses"])


@pytest.mark.world
def test_releases(alone, core):
    """0.12 and 0.13 choose the product in every pass; newer ones build layers by another way."""
    cases = ("dense delayed", "latent blockwise")
    there = train(core, 1, *cases) if core.tree else alone
    for case in cases:
        assert there[case]["casts"] == rounded(case)
        close(there[case]["losses"], alone[case]["losses"])
