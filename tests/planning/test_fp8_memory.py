"""The memory that FP8 products need, against an H200's peaks and by hand."""

import pytest

from bundle.environment.hardware import build_preset
from bundle.recipe import load
from tests.planning.jobs import DEEPSEEK, QWEN3, job, plan
from tests.planning.measured import EIGHT_ROWS, FOUR_ROWS, GPU, QWEN3_1_7B, QWEN3_EXPERTS

H200 = build_preset("h200")
TOKENS, HIDDEN, FFN = 2 * 64, 64, 96  # of a micro-batch


@pytest.mark.parametrize(
    ("model", "rows", "scaling", "gib"),
    [
        ("gqa", EIGHT_ROWS, None, 37.7),
        ("gqa", EIGHT_ROWS, "tensorwise", 36.6),
        ("latent", EIGHT_ROWS, None, 49.8),
        ("latent", EIGHT_ROWS, "tensorwise", 48.7),
        ("latent", EIGHT_ROWS, "delayed", 49.3),
        ("gqa", ("train.micro_batch_size=4", *QWEN3_1_7B), None, 64.5),
        ("adapters", FOUR_ROWS, None, 96.8),
        ("adapters", FOUR_ROWS, "tensorwise", 114.2),
        ("gqa", (*EIGHT_ROWS, *QWEN3_EXPERTS), None, 71.8),
        ("gqa", (*EIGHT_ROWS, *QWEN3_EXPERTS), "tensorwise", 73.8),
    ],
)
def test_the_peaks_of_training_on_one_h200(model, rows, scaling, gib):
    """The peaks of torch's allocator, with megatron-core 0.16.1 and Transformer Engine 2.14.1."""
    fp8 = [f"model.fp8={{scaling: {scaling}}}"] if scaling else []
    recipe = load(str(GPU / f"{model}.yaml"), [*rows, *fp8])
    peak = plan(recipe, H200, per_node=1).memory[0].learning_peak
    assert peak / 2**30 == pytest.approx(gib, rel=0.02)


def count_saved_bytes(config, fp8, lora=None, recompute=None, version="0.16.1", **sections):
    model = {"config": config, "fp8": fp8 and {"scaling": fp8}, "lora": lora, "recompute": recompute}
    train = {"micro_batch_size": 2, "global_batch_size": 4}
    recipe = job(config, model=model, train=train, **sections)
    made = plan(recipe, H200, version, nodes=1, per_node=recipe.parallel.tp)
    return made.memory[0].activations.saved


def compute_difference(config, fp8, **options):
    """The bytes that bf16 saves and FP8 does not."""
    return count_saved_bytes(config, None, **options) - count_saved_bytes(config, fp8, **options)


@pytest.mark.parametrize("scaling", ["tensorwise", "blockwise"])
def test_inputs_that_only_products_read_have_one_byte(scaling):
    assert compute_difference(QWEN3, scaling) == 4 * TOKENS * (2 * HIDDEN + FFN)


@pytest.mark.parametrize(("scaling", "version"), [("delayed", "0.16.1"), ("tensorwise", "0.13.1")])
def test_some_projections_also_save_a_copy_of_attention_s_output(scaling, version):
    attention = 4 * 16
    difference = compute_difference(QWEN3, scaling, version=version)
    assert difference == 4 * TOKENS * (2 * HIDDEN + FFN - attention)


def test_recomputed_parts_save_no_copies():
    """What is left: of an MLP the input of queries, keys and values; of attention its output."""
    mlp = {"granularity": "selective", "modules": ["mlp"]}
    assert compute_difference(QWEN3, "tensorwise", recompute=mlp) == 4 * TOKENS * HIDDEN
    attention = {"granularity": "selective", "modules": ["core_attn"]}
    inputs = 2 * HIDDEN + FFN
    assert compute_difference(QWEN3, "tensorwise", recompute=attention) == 4 * TOKENS * inputs
    assert compute_difference(QWEN3, "delayed", recompute=attention) == 4 * TOKENS * (inputs + 4 * 16)


def test_ranks_share_what_fp8_saves():
    layout = {"tp": 2, "sequence_parallel": True}
    config = QWEN3 | {"intermediate_size": 64}
    difference = compute_difference(config, "tensorwise", parallel=layout)
    assert difference == 4 * TOKENS * (2 * HIDDEN + 64) // 2


def test_experts_latent_attention_and_mtp():
    """A dense layer, three with experts and one of MTP."""
    config = DEEPSEEK | {"moe_intermediate_size": 48, "q_lora_rank": 32, "kv_lora_rank": 16}
    latent, expert = 32 + 16, 2 * (HIDDEN + 48) + 48
    tensorwise = (latent + HIDDEN + FFN) + 4 * (latent + expert) + 2 * HIDDEN
    assert compute_difference(config, "tensorwise") == TOKENS * tensorwise
    copies = 5 * 4 * 12 + 4 * HIDDEN  # of attention's outputs, and of the inputs of shared experts
    assert compute_difference(config, "delayed") == TOKENS * (tensorwise - copies)


@pytest.mark.parametrize(("dropout", "version"), [(0.0, "0.16.1"), (0.1, "0.16.1"), (0.0, "0.13.1")])
def test_adapted_products_with_a_norm_save_a_copy_beside_the_input(dropout, version):
    """Other products are frozen and save nothing; their adapters read the input in bf16."""
    lora = {"rank": 4, "alpha": 8, "dropout": dropout}
    for config, targets, copied in (
        (QWEN3, ["q_proj", "o_proj", "up_proj", "down_proj"], 4 * 2 * HIDDEN),
        (QWEN3, ["q_proj"], 4 * HIDDEN),
        (QWEN3, ["o_proj"], 0),
        (DEEPSEEK | {"q_lora_rank": 32}, ["q_b_proj", "kv_b_proj"], 5 * (32 + 20)),
    ):
        lora = lora | {"targets": targets}
        assert compute_difference(config, "tensorwise", lora=lora, version=version) == -TOKENS * copied


def test_dropout_adds_its_inputs_to_the_output_of_the_norm():
    lora = {"rank": 4, "alpha": 8, "targets": ["q_proj"]}
    without, dropped = (count_saved_bytes(QWEN3, None, lora | {"dropout": share}) for share in (0.0, 0.1))
    assert dropped - without == 4 * TOKENS * HIDDEN * (2 + 1)
