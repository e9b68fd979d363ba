"""Predicted activations against what real ranks keep for their backward passes, and how many wait at once."""

import importlib.metadata
import json

import pytest
from packaging.version import Version

from bundle.capabilities.cpu import LOCAL_LAYER_TRAITS
from bundle.environment.packages import MegatronCode
from bundle.planning.activations import estimate_activations
from bundle.planning.layout import build_rank_layout
from bundle.recipe import load

BF16 = "model.dtype=bf16"
SELECTIVE = "model.recompute.granularity=selective"
LORA = "model.lora={{rank: 12, alpha: 8, targets: [{}]}}"  # what is frozen keeps no input
DORA = LORA.replace("rank", "use_dora: true, rank")
DROPOUT = LORA.replace("rank", "dropout: 0.1, rank")
CASES = [
    ["demo"],
    ["demo", BF16],
    ["demo", "parallel.ep=1", "parallel.pp=2", "train.global_batch_size=32"],
    ["demo", "parallel.ep=1", "parallel.tp=2", "parallel.etp=2", BF16],
    ["demo", SELECTIVE, "model.recompute.modules=[core_attn, moe]"],
    ["qwen3-tp2-sp"],
    ["qwen3-tp2-sp", BF16, SELECTIVE, "model.recompute.modules=[mlp]"],
    ["qwen3-pp2-vpp2"],
    ["qwen3-pp2-vpp2", BF16, "train.global_batch_size=16"],
    ["qwen3-pp2-vpp2", "parallel.vpp=null", "model.recompute.granularity=full"],
    ["demo", "parallel={pp: 2, pipeline_model_parallel_layout: E|tt|t|tmL}", "train.global_batch_size=32"],
    ["demo", "parallel={pp: 2, pipeline_model_parallel_layout: Et|tt|t|mL}", "train.global_batch_size=32"],
    ["demo", "model.recompute.granularity=full", "model.mtp.layers=2"],
    ["demo", "model.recompute={granularity: full, method: block, layers: 2}", BF16],
    ["demo", "parallel={pp: 2, pipeline_model_parallel_layout: E|ttttmL}", "train.global_batch_size=32"],
    [
        "demo",
        "model.mtp.layers=2",
        "parallel={pp: 2, pipeline_model_parallel_layout: Etttt|mmL}",
        "train.global_batch_size=32",
    ],
    ["qwen3-cp2-packed"],
    ["qwen3-cp2-packed", BF16],
    ["qwen3-tp2-sp", BF16, LORA.format("q_proj, v_proj")],
    ["qwen3-tp2-sp", BF16, LORA.format("down_proj"), SELECTIVE, "model.recompute.modules=[core_attn]"],
    ["qwen3-pp2-vpp2", BF16, LORA.format("gate_proj, o_proj")],
    ["qwen3-pp2-vpp2", BF16, LORA.format("q_proj"), SELECTIVE, "model.recompute.modules=[mlp]"],
    ["demo", BF16, LORA.format("all-linear")],
    ["demo", BF16, LORA.format("kv_b_proj")],
    ["demo", "parallel.ep=1", "parallel.tp=2", "parallel.etp=2", BF16, LORA.format("down_proj, q_a_proj")],
    ["demo", LORA.format("o_proj"), "model.recompute.granularity=full"],
    ["qwen3-tp2-sp", BF16, DROPOUT.format("all-linear")],
    ["demo", BF16, DROPOUT.format("all-linear")],
    ["qwen3-tp2-sp", BF16, DORA.format("q_proj, o_proj, up_proj")],
    ["demo", BF16, DORA.format("all-linear")],
]


@pytest.mark.world
@pytest.mark.slow
def test_what_ranks_keep_and_how_many_wait(installed):
    release = MegatronCode(Version(Version(importlib.metadata.version("megatron-core")).base_version))
    ranks = installed.world.run("tests.planning.rank", 2, *map(json.dumps, CASES), timeout=300)
    measured = [json.loads(said.splitlines()[-1]) for said in ranks]
    for index, (name, *overrides) in enumerate(CASES):
        recipe = load(name, overrides)
        layout = build_rank_layout(recipe, 2)
        for rank in range(2):
            stage = layout.find_axis("pp").find_rank_in_group(rank)
            expected = estimate_activations(recipe, layout, stage, LOCAL_LAYER_TRAITS, release)
            found = measured[rank][index]
            chunks = len(layout.stages[stage])
            assert found["microbatches"] == layout.microbatches * chunks
            assert found["in_flight"] == sum(expected.in_flight), (name, overrides, rank)
            kept = found["kept"] / layout.microbatches
            near = 0.07 if recipe.data.packed else 0.013 if recipe.model.lora else 0.03
            assert expected.microbatch_bytes == pytest.approx(kept, rel=near), (name, overrides, rank)


@pytest.mark.parametrize(("changes", "outputs"), [([], 2), (["model.mtp.layers=0"], 1)])
def test_a_frozen_embedding_s_outputs_stay_with_their_gradients(changes, outputs):
    def of_stage(stage, *more):
        recipe = load(
            "demo", ["parallel.pp=2", "parallel.ep=1", "train.global_batch_size=32", *changes, *more]
        )
        layout = build_rank_layout(recipe, 2)
        release = MegatronCode(Version("0.16.1"))
        return estimate_activations(recipe, layout, stage, LOCAL_LAYER_TRAITS, release).transient, recipe

    for stage in (0, 1):
        (frozen, recipe), (whole, _) = of_stage(stage, LORA.format("o_proj")), of_stage(stage)
        tokens = recipe.train.micro_batch_size * recipe.data.sequence_length
        embeds = 1 if stage == 0 else outputs - 1  # the last stage embeds for multi-token prediction
        assert frozen - whole == 2 * 4 * embeds * tokens * recipe.architecture.hidden_size


def test_an_mtp_layer_alone_in_its_stage_comes_back_whole():
    laid_out = "parallel={pp: 4, pipeline_model_parallel_layout: Ett|tt|m|L}"

    def of_stage(*more, release="0.16.1"):
        recipe = load("demo", [laid_out, "train.global_batch_size=64", *more])
        return estimate_activations(
            recipe, build_rank_layout(recipe, 4), 2, LOCAL_LAYER_TRAITS, MegatronCode(Version(release))
        )

    whole, again = of_stage(), of_stage("model.recompute.granularity=full")
    tokens, hidden = 8 * 128, 128
    kept = 2 * tokens * hidden * 4  # in fp32: the trunk's rows and those of the layer go on, its inputs stay
    assert again.transient == whole.microbatch_bytes - kept - 8 * tokens
    assert again.microbatch_bytes == 2 * kept + 8 * tokens
    blocks = of_stage("model.recompute={granularity: full, method: block}")
    assert blocks.microbatch_bytes == whole.microbatch_bytes
    early, recomputed = (
        of_stage(*more, release="0.13.1") for more in ((), ("model.recompute.granularity=full",))
    )
    assert recomputed.microbatch_bytes == early.microbatch_bytes
