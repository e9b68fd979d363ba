"""Rotary positions of a config, in both spellings, and what of them would not be computed."""

import math

import pytest

from bundle.architectures import RopeScaling, from_config
from tests.architectures.test_architectures import DENSE, V3, violations

LLAMA = DENSE | {"model_type": "llama"}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 0.5, "high_freq_factor": 3.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def scaling(parameters: dict, config: dict = LLAMA) -> RopeScaling:
    found = from_config(config | {"rope_scaling": parameters}).rope_scaling
    assert found is not None
    return found


def test_rope_parameters_of_transformers_5_say_the_same():
    stretched = LLAMA3 | {"original_max_position_embeddings": 4096}
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": stretched}
    new = LLAMA | {"rope_parameters": stretched | {"rope_theta": 5e5}}
    mixed = LLAMA | {"rope_theta": 5e5, "rope_parameters": stretched}
    assert from_config(old) == from_config(new) == from_config(mixed)
    wanted = RopeScaling("llama3", 8.0, 4096, low_freq_factor=0.5, high_freq_factor=3.0)
    assert from_config(old).rope_scaling == wanted
    assert from_config(old).rotary_base == 5e5


def test_the_original_length_is_that_of_the_model_where_nobody_says():
    assert scaling(LLAMA3).original_max_position_embeddings == 128


@pytest.mark.parametrize(
    ("more", "concentration"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"mscale": 1, "mscale_all_dim": 1}, 1.0),
        ({"mscale": 2.0, "mscale_all_dim": 0.5}, (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
        ({"mscale": 2.0, "mscale_all_dim": 0}, 0.1 * math.log(4) + 1),  # one of the two alone counts nothing
        ({"mscale_all_dim": 0.5, "mscale": None}, 0.1 * math.log(4) + 1),
        ({"mscale": 2.0, "mscale_all_dim": 0.5, "attention_factor": 1.7}, 1.7),
    ],
)
def test_what_yarn_multiplies_by(more, concentration):
    found = scaling(YARN | more)
    assert found.concentration == pytest.approx(concentration, rel=1e-12)
    assert found.softmax_mscale == (more.get("mscale_all_dim") or 0.0)


def test_yarns_bounds_have_defaults_for_null_and_zero_too():
    plain = scaling(YARN)
    assert (plain.beta_fast, plain.beta_slow, plain.truncate) == (32.0, 1.0, True)
    assert scaling(YARN | {"beta_fast": None, "beta_slow": 0}) == plain
    other = scaling(YARN | {"beta_fast": 8, "beta_slow": 2, "truncate": False})
    assert (other.beta_fast, other.beta_slow, other.truncate) == (8.0, 2.0, False)


REFUSED = [
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "longrope"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}}, "rope_scaling.beta"),
    ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "differs from rope_type"),
    ({"rope_scaling": {}, "rope_parameters": {"rope_type": "default"}}, "one of the two"),
    ({"rope_theta": 10.0, "rope_parameters": {"rope_theta": 20.0}}, "one of the two"),
    ({"rope_scaling": YARN | {"factor": None}}, "factor"),
    ({"rope_scaling": YARN | {"attention_factor": 0.0}}, "attention_factor"),
    ({"rope_scaling": YARN, "rope_theta": 1}, "rope_theta"),
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": 3.0}}, "must be above low_freq_factor"),
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": 0}}, "must be above low_freq_factor"),
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": None}}, "low_freq_factor"),
    ({"partial_rotary_factor": 0.5}, "rotates whole heads"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "rotates whole heads"),
]


@pytest.mark.parametrize(("change", "named"), REFUSED)
def test_what_would_not_be_computed_is_refused_by_name(change, named):
    found = violations(LLAMA | change)
    assert len(found) == 1 and named in found[0]


def test_latent_attention_takes_every_kind_and_rotates_all_of_its_own_part():
    assert scaling(LLAMA3, V3).kind == "llama3"
    found = violations(V3 | {"partial_rotary_factor": 0.5})
    assert len(found) == 1 and "rotates whole heads" in found[0]
    assert from_config(V3 | {"partial_rotary_factor": 1.0}) == from_config(V3)
