"""Rotary positions of a config: as transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters) has them.

What each number means is said by `transformers.modeling_rope_utils`: defaults, and what yarn multiplies by.
"""

import math
from typing import NamedTuple

from bundle.architectures.architecture import RopeScaling
from bundle.architectures.keys import Keys

KINDS = ("default", "linear", "llama3", "yarn")


class Rope(NamedTuple):
    """Base frequency, rotated fraction of a head, and stretching."""

    base: float
    fraction: float
    scaling: RopeScaling | None


def read(keys: Keys, default_base: float = 10000.0, default_fraction: float | None = None) -> Rope:
    """The rotary positions; violations go to `keys`.

    Without a `default_fraction` the family's class rotates whole heads, whatever partial_rotary_factor says.
    """
    new = keys.present("rope_parameters")
    name = "rope_parameters" if new else "rope_scaling"
    if new and keys.present("rope_scaling"):
        keys.refuse("rope_scaling", "...", "given besides rope_parameters; keep one of the two")
    nested = Keys(keys.mapping(name))
    base = _either(keys, nested, "rope_theta", default_base, least=1.0, most=1e12)
    fraction = _either(keys, nested, "partial_rotary_factor", default_fraction or 1.0, least=0.0, most=1.0)
    if default_fraction is None and fraction != 1.0:
        why = "this family's class in transformers rotates whole heads; leave the key out"
        keys.refuse("partial_rotary_factor", fraction, why)
    scaling = _scaling(keys, nested, base)
    keys.absorb(nested, name)
    return Rope(base, fraction, scaling)


def _either(keys: Keys, nested: Keys, name: str, default: float, *, least: float, most: float) -> float:
    """The number under `name` among the rotary parameters, or else beside them, as transformers 4 has it."""
    beside = keys.number(name, default, least, most) if keys.present(name) else default
    if not nested.present(name):
        return beside
    number = nested.number(name, default, least, most)
    if keys.present(name) and number != beside:
        keys.refuse(name, beside, f"the rotary parameters say {number:g}; keep one of the two")
    return number


def _scaling(keys: Keys, nested: Keys, base: float) -> RopeScaling | None:
    kind = nested.value("rope_type") or nested.value("type") or "default"
    nested.only("type", None, kind, why=f"differs from rope_type {kind}")
    if kind == "default":
        return None
    if kind not in KINDS:
        nested.refuse("rope_type", kind, f"not supported; supported: {', '.join(KINDS)}")
        nested.ignore_rest()
        return None
    factor = nested.number("factor", least=1.0)
    if kind == "linear":
        return RopeScaling("linear", factor)
    original = (
        nested.integer("original_max_position_embeddings")
        if nested.present("original_max_position_embeddings")
        else keys.integer("max_position_embeddings")
    )
    if kind == "llama3":
        return _llama3(nested, factor, original)
    if base == 1.0:
        keys.refuse("rope_theta", base, "yarn divides by its logarithm")
    return _yarn(nested, factor, original)


def _llama3(nested: Keys, factor: float, original: int) -> RopeScaling:
    low, high = nested.number("low_freq_factor"), nested.number("high_freq_factor")
    if not nested.unreadable and not 0 < low < high:
        nested.refuse(
            "high_freq_factor", high, f"must exceed low_freq_factor, {low:g}, and that must exceed 0"
        )
    return RopeScaling("llama3", factor, original, low_freq_factor=low, high_freq_factor=high)


def _yarn(nested: Keys, factor: float, original: int) -> RopeScaling:
    mscale, all_dim, given = (_optional(nested, n) for n in ("mscale", "mscale_all_dim", "attention_factor"))
    if nested.present("attention_factor"):
        concentration = given
        if not concentration:
            nested.refuse("attention_factor", given, "leaves nothing of what is rotated")
    elif mscale and all_dim:
        concentration = _mscale(factor, mscale) / _mscale(factor, all_dim)
    else:
        concentration = _mscale(factor, 1.0)
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=_optional(nested, "beta_fast") or 32.0,
        beta_slow=_optional(nested, "beta_slow") or 1.0,
        truncate=nested.flag("truncate", True),
        concentration=concentration,
        softmax_mscale=all_dim,
    )


def _optional(nested: Keys, name: str) -> float:
    """The number under `name`; 0 for a missing key or null, which transformers takes for the same."""
    return nested.number(name) if nested.present(name) else 0.0


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0
