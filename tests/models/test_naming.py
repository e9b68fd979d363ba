"""One name for one weight: in every layout, in megatron's own specs and in Transformer Engine's."""

import pytest
import torch

from bundle.errors import JobFailed
from bundle.models.gpt import initialize
from bundle.models.naming import Shard, find_parameters
from tests.models.trees import Weight, chunk, groups

LAYER = "decoder.layers.2."
NORM, MATRIX = Weight((8,)), Weight((8, 8))

# Transformer Engine's name: the name in megatron's own specs.
FOLDED = {
    "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": "decoder.layers.0.input_layernorm.weight",
    "decoder.layers.0.self_attention.linear_qkv.layer_norm_bias": "decoder.layers.0.input_layernorm.bias",
    "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": "decoder.layers.0.pre_mlp_layernorm.weight",
    "decoder.layers.1.self_attention.linear_q_up_proj.layer_norm_weight": (
        "decoder.layers.1.self_attention.q_layernorm.weight"
    ),
    "mtp.layers.0.mtp_model_layer.self_attention.linear_kv_up_proj.layer_norm_weight": (
        "mtp.layers.0.transformer_layer.self_attention.kv_layernorm.weight"
    ),
}


@pytest.mark.parametrize("given", FOLDED)
def test_a_folded_norm_has_the_name_of_the_norm(given):
    assert [named.name for named in find_parameters(chunk({given: NORM}), groups())] == [FOLDED[given]]


@pytest.mark.parametrize(
    "name",
    [
        "embedding.word_embeddings.weight",
        "decoder.layers.1.input_layernorm.weight",
        "decoder.layers.1.mlp.router.weight",
        "decoder.layers.1.self_attention.linear_q_up_proj.weight",
        "decoder.layers.1.mlp.shared_experts.linear_fc1.weight",
        "mtp.layers.0.eh_proj.weight",
    ],
)
def test_other_names_stay_as_they_are(name):
    assert [named.name for named in find_parameters(chunk({name: MATRIX}), groups())] == [name]


def test_a_norm_folded_elsewhere_is_refused_by_name(messages):
    name = "decoder.layers.0.self_attention.linear_gate.layer_norm_weight"
    with pytest.raises(JobFailed, match=name) as error:
        list(find_parameters(chunk({name: NORM}), groups()))
    messages(error.value)


def experts_of_both_specs(count: int, ffn: int) -> list[torch.nn.Module]:
    """The experts of one rank as megatron's own specs hold them, and as Transformer Engine does."""
    sizes = {"linear_fc1": ((2 * ffn, 6), 0), "linear_fc2": ((6, ffn), 1)}
    own, grouped = {}, {}
    for projection, (shape, dim) in sizes.items():
        for expert in range(count):
            own[f"{LAYER}mlp.experts.local_experts.{expert}.{projection}.weight"] = Weight(shape, dim)
            # Transformer Engine leaves these unmarked: megatron does the communication itself.
            weight = Weight(shape, mode=None, gemms=count)
            grouped[f"{LAYER}mlp.experts.{projection}.weight{expert}"] = weight
    return [chunk(own), chunk(grouped)]


def test_grouped_experts_are_named_and_cut_like_single_ones():
    layout = groups(ep=(2, 1), etp=(2, 1))
    own, grouped = (
        {named.name: (named.shard, named.compute_full_shape()) for named in find_parameters(tree, layout)}
        for tree in experts_of_both_specs(4, 5)
    )
    assert own == grouped
    experts = f"{LAYER}mlp.experts.local_experts"
    assert own[f"{experts}.7.linear_fc1.weight"] == (Shard(0, 1, 2, blocks=(1, 1)), [20, 6])
    assert own[f"{experts}.4.linear_fc2.weight"] == (Shard(1, 1, 2), [6, 10])


def test_grouped_experts_get_the_weights_of_single_ones():
    """In every layout: the ranks of ep 2 and etp 2 hold together what one rank with single experts holds."""

    def filled(tree: torch.nn.Module, layout) -> dict[str, torch.Tensor]:
        initialize(find_parameters(tree, layout), seed=5, std=0.1, num_layers=4)
        return {named.name: named.parameter.detach() for named in find_parameters(tree, layout)}

    whole = filled(experts_of_both_specs(4, 4)[0], groups())
    assert len({tensor.sum().item() for tensor in whole.values()}) == 8
    for ep in range(2):
        parts = [filled(experts_of_both_specs(2, 2)[1], groups(ep=(2, ep), etp=(2, etp))) for etp in range(2)]
        for name in parts[0]:
            first, second = (part[name] for part in parts)
            if ".linear_fc2." in name:
                assert torch.equal(whole[name], torch.cat([first, second], 1))
            else:  # each rank has its part of the gate, then its part of the up projection
                blocks = zip(first.chunk(2), second.chunk(2), strict=True)
                assert torch.equal(whole[name], torch.cat([torch.cat(block) for block in blocks]))


def test_what_transformer_engine_holds_whole_is_not_cut():
    """It marks the weights of duplicated layers as parts, like those of column-parallel ones."""
    attention = f"{LAYER}self_attention."
    down, up = f"{attention}linear_q_down_proj", f"{attention}linear_q_up_proj"
    tree = chunk(
        {
            f"{down}.weight": Weight((8, 8), 0, mode=None),
            f"{up}.layer_norm_weight": Weight((8,), mode="column"),
            f"{up}.weight": Weight((8, 8), 0, mode="column"),
            f"{attention}linear_proj.weight": Weight((8, 8), 1, mode="row"),
            "output_layer.weight": Weight((8, 8), 0),
        }
    )
    cuts = {named.name: named.shard for named in find_parameters(tree, groups(tp=(2, 1)))}
    assert cuts == {
        f"{down}.weight": None,
        f"{attention}q_layernorm.weight": None,
        f"{up}.weight": Shard(0, 1, 2),
        f"{attention}linear_proj.weight": Shard(1, 1, 2),
        "output_layer.weight": Shard(0, 1, 2),
    }
