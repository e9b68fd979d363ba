"""Rotary positions of a config, as `transformers` 4 (rope_theta, rope_scaling) or 5 write them."""

from bundle.architectures.architecture import RopeScaling
from bundle.architectures.keys import Keys
from bundle.frozen import frozen

# megatron-core hard-codes these three for Llama-3 scaling, in every release from 0.12 to 0.19
# (`RotaryEmbedding._apply_scaling`); only the factor can be chosen.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@frozen
class Rope:
    """Base frequency, rotated fraction of a head, and stretching."""

    base: float
    fraction: float
    scaling: RopeScaling | None


def read(keys: Keys, default_base: float = 10000.0, default_fraction: float = 1.0) -> Rope:
    """The rotary positions; violations go to `keys`."""
    new = keys.present("rope_parameters")
    name = "rope_parameters" if new else "rope_scaling"
    if new and keys.present("rope_scaling"):
        keys.refuse("rope_scaling", "...", "given besides rope_parameters; keep one of the two")
    nested = Keys(keys.mapping(name))
    outer = nested if new else keys
    base = outer.number("rope_theta", default_base, least=1.0)
    fraction = outer.number("partial_rotary_factor", default_fraction, most=1.0)
    scaling = _scaling(nested)
    keys.absorb(nested, name)
    return Rope(base, fraction, scaling)


def _scaling(nested: Keys) -> RopeScaling | None:
    kind = nested.value("rope_type") or nested.value("type") or "default"
    nested.only("type", None, kind, why=f"differs from rope_type {kind}")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", nested.number("factor", least=1.0))
    if kind == "llama3":
        for name, value in LLAMA3.items():
            if nested.number(name) != value:
                nested.refuse(
                    name, nested.value(name), f"megatron-core computes with {value:g}, not adjustable"
                )
        return RopeScaling("llama3", nested.number("factor", least=1.0), 8192)
    if kind == "yarn":
        nested.only("attention_factor", None, why="megatron-core derives it from factor and mscale")
        nested.only("truncate", True, why="not computed by megatron-core")
        if nested.present("mscale") != nested.present("mscale_all_dim"):
            nested.refuse("mscale", nested.value("mscale"), "give both of mscale and mscale_all_dim, or none")
        return RopeScaling(
            "yarn",
            factor=nested.number("factor", least=1.0),
            original_max_position_embeddings=nested.integer("original_max_position_embeddings"),
            beta_fast=nested.number("beta_fast", 32.0),
            beta_slow=nested.number("beta_slow", 1.0),
            mscale=nested.number("mscale", 1.0),
            mscale_all_dim=nested.number("mscale_all_dim", 0.0),
        )
    nested.refuse("rope_type", kind, "not supported; supported: default, linear, llama3, yarn")
    nested.ignore_rest()
    return None
