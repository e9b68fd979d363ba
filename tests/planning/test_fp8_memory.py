"""The memory that FP8 products need, against an H200's peaks and by hand."""

from pathlib import Path

import pytest

from bundle.environment.hardware import build_preset
from bundle.recipe import load
from tests.planning.jobs import DEEPSEEK, QWEN3, job, plan

GPU = Path(__file__).parents[2] / "benchmarks/gpu"
H200 = build_preset("h200")
TOKENS, HIDDEN, FFN = 2 * 64, 64, 96  # of a micro-batch


@pytest.mark.parametrize(
    ("model", "scaling", "gib"),
    [
        ("gqa", None, 37.7),
        ("gqa", "tensorwise", 36.6),
        ("latent", None, 49.8),
        ("latent", "tensorwise", 48.7),
        ("latent", "delayed", 49.3),
    ],
)
def test_the_peaks_of_training_on_one_h200(model, scaling, gib):
    """The peaks of torch's allocator, with megatron-core 0.16.1 and Transformer Engine 2.14.1."""
    fp8 = [f"model.fp8={{scaling: {scaling}}}"] if scaling else []
    made = plan(load(str(GPU / f"{model}.yaml"), ["train.micro_batch_size=8", *fp8]), H200, per_node=1)
    assert made.memory[0].learning_peak / 2**30 == pytest.approx(gib, rel=0.02)


def saved(config, fp8, lora=None, **sections):
    model = {"config": config, "fp8": fp8 and {"scaling": fp8}, "lora": lora}
    train = {"micro_batch_size": 2, "global_batch_size": 4}
    recipe = job(config, model=model, train=train, **sections)
    made = plan(recipe, H200, nodes=1, per_node=recipe.parallel.tp)
    return made.memory[0].activations.saved


def compute_difference(config, fp8, **sections):
    """The bytes that bf16 saves and FP8 does not."""
    return saved(config, None, **sections) - saved(config, fp8, **sections)


@pytest.mark.parametrize("scaling", ["tensorwise", "blockwise"])
def test_inputs_that_only_products_read_have_one_byte(scaling):
    assert compute_difference(QWEN3, scaling) == 4 * TOKENS * (2 * HIDDEN + FFN)


def test_delayed_scaling_also_saves_a_copy_of_attention_s_output():
    assert compute_difference(QWEN3, "delayed") == 4 * TOKENS * (2 * HIDDEN + FFN - 4 * 16)


def test_ranks_share_what_fp8_saves():
    layout = {"tp": 2, "sequence_parallel": True}
    config = QWEN3 | {"intermediate_size": 64}
    difference = compute_difference(config, "tensorwise", parallel=layout)
    assert difference == 4 * TOKENS * (2 * HIDDEN + 64) // 2


def test_experts_latent_attention_and_mtp():
    """A dense layer, three with experts and one of MTP; shared experts add a copy of the router's input."""
    config = DEEPSEEK | {"moe_intermediate_size": 48, "q_lora_rank": 32, "kv_lora_rank": 16}
    latent, expert = 32 + 16, 2 * (HIDDEN + 48) + 48 - HIDDEN
    layers = (latent + HIDDEN + FFN) + 4 * (latent + expert)
    assert compute_difference(config, "tensorwise") == TOKENS * (layers + 2 * HIDDEN)


def test_adapters_read_inputs_in_bf16():
    assert compute_difference(QWEN3, "tensorwise", lora={"rank": 4, "alpha": 8}) == 0
