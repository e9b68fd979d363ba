"""How the configs of models that see images are read: both spellings, and what is refused."""

import copy

import pytest

from bundle.architectures import from_config
from bundle.architectures.tensors import Tensors
from bundle.errors import UsageError
from tests.vision import reference
from tests.vision.cases import CASES

FLAT = CASES[0].config
OLD = ("rope_theta", "rope_scaling", "hidden_size", "num_hidden_layers", "rms_norm_eps", "vocab_size")


def violations(config):
    with pytest.raises(UsageError) as refused:
        from_config(config)
    return " ".join(refused.value.violations)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_transformers_writes_is_the_same_model(case):
    pytest.importorskip("transformers")
    read = from_config(case.config)
    written = reference._config(case).to_dict()
    assert from_config(written) == read
    beside = {name: value for name, value in written["text_config"].items() if name in OLD}
    assert from_config(written | beside) == read  # as some versions write it: both
    assert "hidden_size" in violations(written | {"hidden_size": 52})


def test_the_numbers_of_an_architecture():
    read = from_config(FLAT)
    assert (read.model_type, read.rotary_sections, read.rotary_base) == ("qwen2_5_vl", (2, 3, 1), 700.0)
    assert read.vision and (read.vision.patch_values, read.vision.patches) == (3 * 2 * 16, 4)
    assert (read.vision.full_layers, read.vision.image_token, read.qkv_bias) == ((1,), 190, True)


def test_a_table_names_what_transformers_saves(seen):
    for case in CASES:
        table = Tensors(from_config(case.config))
        ours = dict(pair for tensor in table for pair in tensor.published_shapes())
        theirs = {name: tuple(of.shape) for name, of in reference.tensors(seen / case.name).items()}
        assert ours == theirs


@pytest.mark.parametrize(
    ("place", "change", "named"),
    [
        ("vision_config", {"hidden_act": "gelu"}, "vision_config.hidden_act"),
        ("vision_config", {"out_hidden_size": 64}, "vision_config.out_hidden_size"),
        ("vision_config", {"window_size": 12}, "vision_config.window_size 12"),
        ("vision_config", {"num_heads": 4}, "vision_config.hidden_size 24"),
        ("vision_config", {"fullatt_block_indexes": [3]}, "vision_config.fullatt_block_indexes [3]"),
        ("vision_config", {"depth": None}, "vision_config.depth"),
        ("vision_config", {"in_chans": 1}, "vision_config.in_chans"),
        ("vision_config", {"windowsize": 8}, "vision_config.windowsize: unknown key"),
        ("vision_config", {"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters.rope_theta"),
        ("rope_scaling", {"mrope_section": [2, 2]}, "mrope_section"),
        ("rope_scaling", {"mrope_section": [2, 2, 1]}, "shares out 5 pairs, a head has 6"),
        ("rope_scaling", {"type": "sometimes"}, "rope_type"),
        (None, {"image_token_id": 203}, "image_token_id 203 is not in the vocabulary"),
        (None, {"image_token_id": None}, "image_token_id"),
        (None, {"vision_config": None}, "vision_config.depth: missing"),
        (None, {"vision_config": 3}, "vision_config: must be a mapping"),
        (None, {"text_config": [1]}, "text_config: must be a mapping"),
    ],
)
def test_what_would_not_be_computed_is_refused_by_name(place, change, named):
    config = copy.deepcopy(FLAT)
    if place:
        config[place] |= change
    else:
        config |= change
    assert named in violations(config)


def test_families_of_text_turn_by_one_position():
    assert "mrope_section" in violations(
        {k: v for k, v in FLAT.items() if "token_id" not in k and k != "vision_config"}
        | {"model_type": "qwen2", "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 1]}}
    )
