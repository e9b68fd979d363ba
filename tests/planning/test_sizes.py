"""Any size is planned or refused at once; no plan takes longer for having more ranks."""

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packaging.version import Version

from bundle.capabilities.cpu import LOCAL_LAYER_TRAITS
from bundle.environment.hardware import build_preset
from bundle.environment.packages import MegatronCode
from bundle.errors import ExitCode, UsageError
from bundle.planning.layout import build_rank_layout
from bundle.planning.memory import StateBuffers
from bundle.recipe import Recipe, load
from tests.planning.jobs import DEEPSEEK, job, plan

RELEASE = "0.16.1"
SECONDS = 5  # a hundred times what it takes; without bounds there was no end


def planned(recipe, named="h200", **options):
    on = build_preset(named)
    return plan(recipe, on, RELEASE, **options)


@pytest.mark.parametrize("ranks", [2**17, 2**20])
def test_a_hundred_thousand_ranks_are_planned_at_once(ranks):
    recipe = load("qwen3-tp2-sp", [f"train.global_batch_size={2 * ranks}"])
    begun = time.process_time()
    made = planned(recipe, nodes=ranks // 8, per_node=8)
    assert time.process_time() - begun < SECONDS
    assert made.layout and made.world == ranks and made.memory[0].states.moments


ABSURD = [
    ("devices.per_node=1000000000",),
    ("devices.nodes=1000000000", "train.global_batch_size=2000000000"),
    ("parallel.tp=1048576", "model.config.num_attention_heads=1048576", "model.config.q_lora_rank=null"),
    ("parallel.pp=4096", "parallel.tp=512", "model.config.num_hidden_layers=4096"),
    ("parallel.cp=2147483647",),
    ("model.config.n_routed_experts=8388608",),
    ("model.config.n_routed_experts=65536", "model.config.num_hidden_layers=4096"),
    ("model.config.num_hidden_layers=1000000000",),
]


@pytest.mark.parametrize("overrides", ABSURD, ids=lambda overrides: overrides[0].partition("=")[0])
@pytest.mark.parametrize("named", ["cpu", "h200"])
def test_absurd_sizes_are_refused_at_once(overrides, named):
    begun = time.process_time()
    try:
        assert planned(load("demo", overrides), named).exit_code is ExitCode.USAGE
    except UsageError as error:
        assert error.violations
    assert time.process_time() - begun < SECONDS


@pytest.mark.parametrize(
    ("named", "nodes", "per_node", "said"),
    [
        ("h200", 2**18, 8, "devices: 2097152 ranks exceed 1048576, the limit of a plan"),
        ("cpu", 1, 2048, "devices.per_node: 2048 ranks are too many for one machine. Use at most 1024"),
    ],
)
def test_the_bound_is_said_of_a_layout_that_would_fit(named, nodes, per_node, said):
    recipe = load("qwen3-tp2-sp", [f"train.global_batch_size={2 * nodes * per_node}"])
    assert said in [
        problem.text for problem in planned(recipe, named, nodes=nodes, per_node=per_node).problems
    ]


SIZES = (st.integers(0, 6) | st.integers(0, 31)).map(lambda power: 2**power) | st.integers(1, 2**31 - 1)
SIZED = (
    *(f"parallel.{axis}" for axis in ("tp", "pp", "vpp", "cp", "ep", "etp")),
    *(f"parallel.num_layers_in_{end}_pipeline_stage" for end in ("first", "last")),
    *(f"devices.{name}" for name in ("nodes", "per_node")),
    *(f"train.{name}" for name in ("global_batch_size", "micro_batch_size", "steps")),
    *(f"model.config.{name}" for name in ("num_hidden_layers", "n_routed_experts", "hidden_size")),
    *(f"model.config.{name}" for name in ("num_attention_heads", "vocab_size", "max_position_embeddings")),
    *(
        f"model.config.{name}"
        for name in ("first_k_dense_replace", "moe_layer_freq", "num_nextn_predict_layers")
    ),
    "data.sequence_length",
    "distributed.bucket_size",
    "model.mtp.layers",
    "model.recompute={granularity: full, layers: %s}",
)


@settings(max_examples=60)
@example(
    {"parallel.ep": 165805756, "parallel.pp": 2, "devices.per_node": 16}, "a3"
)  # the sizes that fit instead are sought below the experts
@given(st.dictionaries(st.sampled_from(SIZED), SIZES, min_size=1, max_size=6), st.sampled_from(["cpu", "a3"]))
def test_any_sizes_are_planned_or_refused_at_once(sizes, named):
    overrides = [key % size if "%" in key else f"{key}={size}" for key, size in sizes.items()]
    begun = time.process_time()
    try:
        planned(load("demo", overrides), named)
    except UsageError as error:
        assert error.violations
    assert time.process_time() - begun < SECONDS


def bytes_by_hand(recipe: Recipe, buffers: StateBuffers, rank: int) -> int:
    """All states of a rank in bf16 with torch's Adam, tensor by tensor of each bucket."""
    sizes, total = recipe.parallel, 0
    world = buffers.layout.world
    stage, inside = divmod(rank, world // sizes.pp)
    for dense, expert in buffers.stages[stage]:
        for buffer, tp, ranks in (
            (dense, sizes.tp, world // sizes.pp // sizes.tp),
            (expert, sizes.etp * sizes.ep, world // sizes.pp // sizes.etp // sizes.ep),
        ):
            mine, total = inside // tp, total + buffer.elements * (2 + 4)
            for first, last in buffer.buckets:
                share = (last - first) // ranks
                lower, upper = first + mine * share, first + (mine + 1) * share
                pieces = [min(s.end, upper) - max(s.start, lower) for s in buffer.spans]
                held = [piece for piece in pieces if piece > 0]
                total += sum(held) * 12 + len(held) * 4
    return total


@pytest.mark.parametrize(
    ("parallel", "world"),
    [
        ({"tp": 2, "ep": 4, "etp": 1, "pp": 1}, 24),
        ({"tp": 1, "ep": 2, "pp": 2, "cp": 2}, 24),
        ({"tp": 2, "ep": 2, "etp": 2, "pp": 1}, 40),
    ],
)
@pytest.mark.parametrize("overlap", [False, True])
def test_the_fullest_rank_is_the_fullest_of_all(parallel, world, overlap):
    recipe = job(
        DEEPSEEK,
        parallel=parallel,
        train={"steps": 3, "global_batch_size": 240},
        distributed={"overlap_grad_reduce": overlap, "bucket_size": 3001},
    )
    buffers = StateBuffers.from_recipe(
        recipe, build_rank_layout(recipe, world), LOCAL_LAYER_TRAITS, MegatronCode(Version(RELEASE))
    )
    by_hand = [bytes_by_hand(recipe, buffers, rank) for rank in range(world)]
    assert [buffers.compute_rank_bytes(rank).device_total for rank in range(world)] == by_hand
    for stage in range(recipe.parallel.pp):
        inside = by_hand[stage * world // recipe.parallel.pp : (stage + 1) * world // recipe.parallel.pp]
        assert buffers.compute_largest_bytes(stage).device_total == max(inside)
    assert len(set(by_hand)) > 2
