"""The list of parameters: whole tensors reassemble from the ranks' parts, whatever the layout."""

import math

from hypothesis import assume, given
from hypothesis import strategies as st

from bundle.architectures import pad_vocab_to_lcm
from bundle.capabilities.cpu import LOCAL_LAYER_TRAITS
from bundle.capabilities.cuda import TRANSFORMER_ENGINE_LAYER_TRAITS
from bundle.planning.layout import build_rank_layout
from bundle.planning.size import list_parameters
from tests.planning.jobs import DEEPSEEK, QWEN2_TIED, QWEN3, job

EMBEDDING = "embedding.word_embeddings.weight"

configs = st.sampled_from([QWEN3, QWEN2_TIED, DEEPSEEK, DEEPSEEK | {"q_lora_rank": None}])


def whole(config, layers, **parallel):
    """Elements of all ranks together, each tensor once, without the copies of the embedding; None: no fit."""
    recipe = job(config, parallel=parallel, train={"steps": 1, "global_batch_size": 64})
    if recipe.find_layout_violations(recipe.parallel.minimal_world):
        return None
    layout = build_rank_layout(recipe, recipe.parallel.minimal_world)
    total = 0
    for chunk in (chunk for stage in layout.stages for chunk in stage):
        for tensor in list_parameters(recipe.architecture, recipe.parallel, chunk, layers):
            if tensor.name.startswith("embedding") and not chunk.embedding:
                continue
            if tensor.name == "output_layer.weight" and recipe.architecture.tied_embeddings:
                continue
            cut = tensor.cut.axis if tensor.cut else None
            parts = {"tp": recipe.parallel.tp, "etp": recipe.parallel.etp, None: 1}[cut]
            total += tensor.elements * parts * (recipe.parallel.ep if tensor.expert else 1)
    return total


@given(
    configs,
    st.sampled_from([LOCAL_LAYER_TRAITS, TRANSFORMER_ENGINE_LAYER_TRAITS]),
    st.sampled_from([1, 2]),
    st.sampled_from([(1, None), (2, None), (2, 2), (4, None)]),
    st.sampled_from([1, 2, 4]),
)
def test_parts_make_the_same_model_in_every_layout(config, layers, tp, stages, ep):
    pp, vpp = stages
    experts = {"ep": ep, "etp": 1} if "n_routed_experts" in config else {}
    cut = whole(config, layers, tp=tp, pp=pp, vpp=vpp, **experts)
    assume(cut is not None)
    assert cut == whole(config, layers)


@given(configs)
def test_fusing_norms_and_grouping_experts_changes_no_count(config):
    assert whole(config, LOCAL_LAYER_TRAITS) == whole(config, TRANSFORMER_ENGINE_LAYER_TRAITS)


def test_a_dense_model_by_hand():
    # qkv 128x64, projection 64x64, two norms of 64, q and k norms of 16, gate, up and down 96x64 each
    layer = 128 * 64 + 64 * 64 + 128 + 32 + 3 * 96 * 64
    assert whole(QWEN3, LOCAL_LAYER_TRAITS) == 2 * 384 * 64 + 4 * layer + 64


@given(st.integers(1, 10**6), st.integers(1, 64))
def test_vocabulary_rows_do_not_follow_tp_where_it_divides_128(size, tp):
    rows = pad_vocab_to_lcm(size, tp)
    assert rows >= size
    assert rows % 128 == 0
    assert rows % tp == 0
    if 128 % tp == 0:
        assert rows == pad_vocab_to_lcm(size, 1)
        assert rows - size < 128
    assert rows - size < math.lcm(128, tp)


def test_names_say_what_is_shared_and_what_is_an_expert():
    recipe = job(DEEPSEEK, parallel={"pp": 2}, train={"steps": 1, "global_batch_size": 16})
    first, last = (stage[0] for stage in build_rank_layout(recipe, 2).stages)
    shared = [
        tensor.name
        for chunk in (first, last)
        for tensor in list_parameters(recipe.architecture, recipe.parallel, chunk, LOCAL_LAYER_TRAITS)
        if tensor.shared_embedding
    ]
    assert shared == [EMBEDDING] * 2
    tensors = list_parameters(recipe.architecture, recipe.parallel, last, LOCAL_LAYER_TRAITS)
    assert all(tensor.expert == (".experts.local_experts." in tensor.name) for tensor in tensors)


def test_a_tied_head_on_a_later_stage_is_a_shared_copy():
    recipe = job(QWEN2_TIED, parallel={"pp": 2}, train={"steps": 1, "global_batch_size": 16})
    last = build_rank_layout(recipe, 2).stages[1][0]
    (head,) = [
        tensor
        for tensor in list_parameters(recipe.architecture, recipe.parallel, last, LOCAL_LAYER_TRAITS)
        if tensor.name == "output_layer.weight"
    ]
    assert head.shared_embedding
    assert not [
        tensor
        for tensor in list_parameters(
            job(QWEN2_TIED).architecture,
            recipe.parallel,
            build_rank_layout(job(QWEN2_TIED), 1).stages[0][0],
            LOCAL_LAYER_TRAITS,
        )
        if tensor.name == "output_layer.weight"
    ]


def test_a_tied_head_beside_mtp_is_the_copy_of_the_embedding_that_mtp_has():
    recipe = job(QWEN2_TIED, parallel={"pp": 2}, model={"mtp": {"layers": 1}})
    last = build_rank_layout(recipe, 2).stages[1][0]
    names = [
        tensor.name
        for tensor in list_parameters(recipe.architecture, recipe.parallel, last, LOCAL_LAYER_TRAITS)
    ]
    assert names.count(EMBEDDING) == 1
    assert "output_layer.weight" not in names
