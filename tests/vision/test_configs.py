"""How the configs of models that see images are read: both spellings, and what is refused."""

import copy

import pytest
import torch

from bundle.architectures import from_config
from bundle.architectures.config import IRRELEVANT_KEYS
from bundle.architectures.tensors import Tensors
from bundle.errors import UsageError
from tests.families.record import note
from tests.vision import reference
from tests.vision.cases import CASES, Case
from tests.vision.reference import as_published
from tools.models import EVERY

FLAT = CASES[0].config
DEEP = next(case.config for case in CASES if case.family == "qwen3_vl")
# What no number of a training step follows from, and of a window that none of these has.
WITHOUT_EFFECT = {"max_position_embeddings", "initializer_range", "attention_dropout", "use_sliding_window"}
# Whom transformers 5 asks whether embeddings are tied.
OF_THE_CONFIG_ALONE = {(family, "text_config.tie_word_embeddings") for family in ("qwen3_vl", "qwen3_vl_moe")}
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
    assert read.vision and (read.vision.values_per_patch, read.vision.patches_per_embedding) == (
        3 * 2 * 16,
        4,
    )
    assert (read.vision.full_layers, read.vision.image_token, read.qkv_bias) == ((1,), 190, True)
    tokens = (read.vision.video_token, read.vision.start_token, read.vision.end_token)
    assert (tokens, read.vision.tokens_per_second) == ((191, 192, 193), 3)


@pytest.mark.parametrize(
    "case", [case for case in CASES if "tied" in case.name], ids=lambda case: case.family
)
@pytest.mark.parametrize("said", [None, False, True])
@pytest.mark.parametrize("of_text", [None, False, True])
def test_embeddings_are_tied_as_in_transformers(case, said, of_text):
    transformers = pytest.importorskip("transformers")
    config = copy.deepcopy(case.config)
    for section, value in ((config, said), (config["text_config"], of_text)):
        section.pop("tie_word_embeddings", None)
        section |= {} if value is None else {"tie_word_embeddings": value}
    if said is None and of_text and case.family != "qwen2_5_vl":
        assert "tie_word_embeddings" in violations(config)
        return
    with torch.device("meta"):
        theirs = transformers.AutoModelForImageTextToText.from_config(reference._config(Case("", config)))
    embedding = theirs.get_input_embeddings().weight
    assert from_config(config).tied_embeddings == (theirs.lm_head.weight is embedding)


def test_experts_whose_weights_do_not_sum_to_one_are_refused(messages):
    config = copy.deepcopy(next(case.config for case in CASES if case.family == "qwen3_vl_moe"))
    config["text_config"]["norm_topk_prob"] = False
    violation = violations(config)
    assert "norm_topk_prob" in violation
    messages(violation)


@pytest.mark.parametrize("depth", [7, 20, 32])
def test_blocks_that_see_all_where_none_are_named_are_those_of_transformers(depth):
    pytest.importorskip("transformers")
    config = copy.deepcopy(FLAT)
    config["vision_config"] |= {"depth": depth}
    del config["vision_config"]["fullatt_block_indexes"]
    vision = from_config(config).vision
    theirs = reference._config(Case("", config)).vision_config.fullatt_block_indexes
    assert vision and vision.full_layers == tuple(number for number in theirs if number < depth)


def test_a_pace_that_is_not_said_is_that_of_transformers():
    pytest.importorskip("transformers")
    config = copy.deepcopy(FLAT)
    del config["vision_config"]["tokens_per_second"]
    vision, theirs = from_config(config).vision, reference._config(Case("", config)).vision_config
    assert vision and vision.tokens_per_second == theirs.tokens_per_second == 4


def test_a_table_names_what_transformers_saves(seen):
    for case in CASES:
        table = Tensors(from_config(case.config))
        ours = dict(pair for tensor in table for pair in tensor.list_published_shapes())
        written = as_published(reference.tensors(seen / case.name), case)
        theirs = {name: tuple(of.shape) for name, of in written.items()}
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
        ("rope_scaling", {"mrope_section": [2, 2, 1]}, "has 5 pairs, but a head has 6"),
        ("rope_scaling", {"type": "sometimes"}, "rope_type"),
        (None, {"image_token_id": 203}, "image_token_id 203 is not in the vocabulary"),
        (None, {"image_token_id": None}, "image_token_id"),
        (None, {"video_token_id": 203}, "video_token_id 203 is not in the vocabulary"),
        (None, {"video_token_id": 190}, "video_token_id 190 is also the image_token_id"),
        (None, {"vision_start_token_id": "<"}, "vision_start_token_id: must be an integer"),
        ("vision_config", {"tokens_per_second": 0.5}, "vision_config.tokens_per_second: must be an integer"),
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


@pytest.mark.parametrize(
    ("place", "change", "named"),
    [
        ("vision_config", {"hidden_act": "gelu"}, "vision_config.hidden_act"),
        (
            "vision_config",
            {"deepstack_visual_indexes": [0, 4]},
            "deepstack_visual_indexes [4]: there are only 4",
        ),
        ("vision_config", {"deepstack_visual_indexes": [1, 1]}, "[1, 1]: a block stands twice"),
        (
            "vision_config",
            {"deepstack_visual_indexes": [0, 1, 2, 3]},
            "4 indexes are too many for a decoder of 3 layers",
        ),
        ("vision_config", {"deepstack_visual_indexes": ...}, "deepstack_visual_indexes: missing"),
        ("vision_config", {"num_position_embeddings": ...}, "num_position_embeddings: missing"),
        ("vision_config", {"window_size": 8}, "vision_config.window_size: unknown key"),
        ("text_config", {"rope_theta": ...}, "text_config.rope_theta: missing"),
        ("text_config", {"rope_scaling": {"mrope_section": [3, 3, 2], "mrope_interleaved": False}}, "order"),
        (None, {"text_config": ...}, "text_config: missing"),
    ],
)
def test_what_a_deep_tower_would_not_compute_is_refused_by_name(place, change, named):
    config = copy.deepcopy(DEEP)
    config["text_config"]["num_hidden_layers"] = 3
    section = config[place] if place else config
    section |= change
    for name in [name for name, value in change.items() if value is ...]:
        del section[name]
    assert named in violations(config)


@pytest.mark.parametrize("family", sorted({case.family for case in CASES}))
def test_every_field_is_held(family):
    """Another value is another model, which the tests of this folder compute, or refused by its name."""
    pytest.importorskip("transformers")
    cases = [case for case in CASES if case.family == family]
    forgotten = [
        name
        for case in cases
        for name, changed in changes(reference._config(case).to_dict())
        if (family, name) not in OF_THE_CONFIG_ALONE
        if not is_held(name, changed, from_config(case.config))
    ]
    assert not forgotten
    note(EVERY, "config", {family: 0.0})


def changes(config, around=lambda changed: changed, at=""):
    """(field, the config with another value there), for the fields of nested sections too."""
    for name, value in config.items():
        if value is None or name in IRRELEVANT_KEYS | WITHOUT_EFFECT:
            continue
        if isinstance(value, dict):
            inside = lambda changed, name=name: around({**config, name: changed})  # noqa: E731
            yield from changes(value, inside, f"{at}{name}.")
        else:
            yield f"{at}{name}", around({**config, name: another(value)})


def another(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return f"{value} of another kind"
    if isinstance(value, list):
        return value[:-1] if value[-1] == 0 else [*value[:-1], another(value[-1])]
    return value * 2


def is_held(path, changed, read):
    name = path.rpartition(".")[2]
    try:
        return from_config(changed) != read
    except UsageError as error:
        of_heads = {"head_dim", "num_attention_heads"}  # mrope_section shares out a head's pairs
        named = "mrope_section" if name in of_heads else name
        return any(named in violation for violation in error.violations)


def test_families_of_text_turn_by_one_position():
    assert "mrope_section" in violations(
        {k: v for k, v in FLAT.items() if "token_id" not in k and k != "vision_config"}
        | {"model_type": "qwen2", "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 1]}}
    )
