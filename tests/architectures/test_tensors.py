"""The table of tensors: published names, shapes and how they make ours, as written out by hand elsewhere."""

import re
from dataclasses import replace

import pytest
import torch

from bundle.architectures import from_config
from bundle.architectures.tensors import Tensors
from tests.reference import weights
from tests.reference.configs import CONFIGS

# What MiMo calls an MTP layer's own modules; the references call them as DeepSeek does.
_MIMO = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "shared_head.norm": "final_layernorm",
}


def published(name):
    """Weights as the family publishes them, by name."""
    config = CONFIGS[name]
    drawn = {key: value.detach() for key, value in weights.drawn(config, seed=3).items()}
    match config["model_type"]:
        case "mimo":
            return as_mimo(config, drawn)
        case "mixtral":
            return {as_mixtral(key): value for key, value in drawn.items()}
    return drawn


def as_mixtral(key):
    """Mixtral's own words for experts and their three matrices."""
    for theirs, its in {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}.items():
        key = re.sub(rf"(experts\.\d+)\.{theirs}", rf"\1.{its}", key)
    return key.replace(".mlp.", ".block_sparse_moe.")


def as_mimo(config, drawn):
    """Under MiMo's names, with its projection of [hidden, embedding]."""
    found = {}
    for key, value in drawn.items():
        at = re.fullmatch(r"model\.layers\.(\d+)\.(.*)\.(weight|bias)", key)
        if at and (depth := int(at[1]) - config["num_hidden_layers"]) >= 0:
            key = f"model.mtp_layers.{depth}.{_MIMO.get(at[2], at[2])}.{at[3]}"
            if at[2] == "eh_proj":
                hidden = config["hidden_size"]
                value = torch.cat([value[:, hidden:], value[:, :hidden]], 1)
        found[key] = value
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_shapes_are_the_published_ones(name):
    table = Tensors(from_config(CONFIGS[name]))
    ours = [pair for tensor in table for pair in tensor.published_shapes()]
    assert len(dict(ours)) == len(ours)
    assert dict(ours) == {key: tuple(value.shape) for key, value in published(name).items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_pieces_make_the_tensors_that_megatron_lays_out(name):
    config, theirs = CONFIGS[name], published(name)
    wanted = weights.megatron_layout(
        config, {k: v.detach() for k, v in weights.drawn(config, seed=3).items()}
    )
    made = {}
    for tensor in Tensors(from_config(config)):
        sources, dim = [theirs[key] for key in tensor.published], tensor.rule.dim
        pieces = [sources[p.source].narrow(dim, p.start, p.stop - p.start) for p in tensor.rule.pieces()]
        made[tensor.name] = torch.cat(pieces, dim)
        behind = tensor.shape[dim] - made[tensor.name].shape[dim]
        assert behind == (28 if tensor.rule.kind == "vocabulary" else 0)
    assert made.keys() == wanted.keys()
    assert not [key for key in made if not torch.equal(made[key], wanted[key])]


def test_copies_are_those_of_the_embedding_and_of_the_head():
    deepseek = CONFIGS["deepseek_v3"] | {"num_nextn_predict_layers": 1}
    copies = {"model.layers.4.embed_tokens.weight": "model.embed_tokens.weight"}
    head = {"model.layers.4.shared_head.head.weight": "lm_head.weight"}
    assert Tensors(from_config(deepseek)).copies() == copies | head
    tied = Tensors(from_config(deepseek | {"tie_word_embeddings": True})).copies()
    assert tied == dict.fromkeys([*copies, *head, "lm_head.weight"], "model.embed_tokens.weight")
    assert Tensors(from_config(CONFIGS["mimo"])).copies() == {"lm_head.weight": "model.embed_tokens.weight"}


def test_layers_that_no_family_publishes_have_no_published_names():
    table = Tensors(replace(from_config(CONFIGS["qwen2"]), mtp_layers=1))
    without = [tensor for tensor in table if not tensor.published]
    assert without
    assert without == list(table.mtp_layer(0))
