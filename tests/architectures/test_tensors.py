"""The table of tensors: published names, shapes and how they make ours, as written out by hand elsewhere."""

from dataclasses import replace

import pytest
import torch

from bundle.architectures import from_config
from bundle.architectures.tensors import Tensors
from tests.reference import weights
from tests.reference.configs import CONFIGS
from tests.reference.published import published

LAYER_5 = ["5.embed_tokens", "5.shared_head.head"]


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_shapes_are_the_published_ones(name):
    table = Tensors(from_config(CONFIGS[name]))
    firsts = [tensor for tensor in table if not (tensor.stack and tensor.stack.entry)]
    ours = [pair for tensor in firsts for pair in tensor.list_published_shapes()]
    assert len(dict(ours)) == len(ours)
    theirs = published(CONFIGS[name], weights.drawn(CONFIGS[name], seed=3))
    assert dict(ours) == {key: tuple(value.shape) for key, value in theirs.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_pieces_make_the_tensors_that_megatron_lays_out(name):
    config, drawn = CONFIGS[name], weights.drawn(CONFIGS[name], seed=3)
    theirs, wanted = published(config, drawn), weights.megatron_layout(config, drawn)
    made = {}
    for tensor in Tensors(from_config(config)):
        sources, dim = [theirs[key] for key in tensor.published_names], tensor.rule.dim
        if tensor.stack:
            sources = [source[tensor.stack.entry].movedim(-1, 0) for source in sources]
        indices = ((p.source, torch.arange(p.start, p.stop, p.step)) for p in tensor.rule.iterate_pieces())
        pieces = [sources[source].index_select(dim, index) for source, index in indices]
        made[tensor.name] = torch.cat(pieces, dim)
        behind = tensor.shape[dim] - made[tensor.name].shape[dim]
        assert behind == (28 if tensor.rule.kind == "vocabulary" else 0)
    assert made.keys() == wanted.keys()
    assert not [key for key in made if not torch.equal(made[key], wanted[key])]


def test_copies_are_those_of_the_embedding_and_of_the_head():
    deepseek = CONFIGS["deepseek_v3"] | {"num_nextn_predict_layers": 1}
    embedding = "model.embed_tokens.weight"
    copies = {"model.layers.4.embed_tokens.weight": embedding}
    head = {"model.layers.4.shared_head.head.weight": "lm_head.weight"}
    assert Tensors(from_config(deepseek)).map_copies() == copies | head
    tied = Tensors(from_config(deepseek | {"tie_word_embeddings": True})).map_copies()
    assert tied == dict.fromkeys([*copies, *head, "lm_head.weight"], embedding)
    assert Tensors(from_config(CONFIGS["mimo"])).map_copies() == {"lm_head.weight": embedding}


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ([], ["4.embed_tokens", "4.shared_head.head", "5.embed_tokens", "5.shared_head.head"]),
        (["model.layers.4.enorm.weight", "model.layers.4.embed_tokens.weight"], ["4.embed_tokens", *LAYER_5]),
        (["model.layers.4.enorm.weight", "model.layers.5.enorm.weight"], []),
    ],
)
def test_copies_to_write_are_those_of_the_source_and_of_new_layers(source, wanted):
    architecture = from_config(CONFIGS["deepseek_v3"])
    copies = Tensors(architecture).list_copies_matching_source(source)
    assert copies == [f"model.layers.{name}.weight" for name in wanted]
    written = {copy: tensor for tensor in Tensors(architecture, 1, copies) for copy in tensor.copy_names}
    assert written.keys() == set(copies)
    for copy, tensor in written.items():
        assert tensor.name == ("embedding.word_embeddings" if "embed" in copy else "output_layer") + ".weight"
        assert dict(tensor.list_published_shapes())[copy] == (
            architecture.vocab_size,
            architecture.hidden_size,
        )


def test_a_tied_head_is_written_where_the_source_has_it():
    tied = Tensors(from_config(CONFIGS["mimo"]))
    assert tied.list_copies_matching_source([]) == []
    assert tied.list_copies_matching_source(["lm_head.weight"]) == ["lm_head.weight"]


def test_layers_that_no_family_publishes_have_no_published_names():
    table = Tensors(replace(from_config(CONFIGS["qwen2"]), mtp_layers=1))
    without = [tensor for tensor in table if not tensor.published_names]
    assert without
    assert without == list(table.build_mtp_layer(0))
