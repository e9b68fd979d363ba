"""Rotary positions: the frequencies of a config, stretched or not, and the turning of heads by them."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Config = Mapping[str, Any]
Table = tuple[Tensor, Tensor]  # cosines and sines [n, dim / 2]

# Where a config names neither: the family's own values, else transformers' common ones.
_THETA = {"mixtral": 1e6, "gpt_oss": 150000.0}
_FRACTION = {"glm4_moe": 0.5}


def settings(config: Config) -> dict[str, Any]:
    """The rotary section in one form, whichever of the two ways of writing it a config has."""
    family = config["model_type"]
    section = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    given = {**config, **section}
    original = "original_max_position_embeddings"
    return {
        **section,
        "kind": section.get("rope_type") or section.get("type") or "default",
        "theta": given.get("rope_theta", _THETA.get(family, 10000.0)),
        "fraction": given.get("partial_rotary_factor", _FRACTION.get(family, 1.0)),
        original: section.get(original) or config["max_position_embeddings"],
    }


def table(config: Config, dim: int, positions: int) -> Table:
    """Cosines and sines for the first `positions`, of `dim` turned values of a head."""
    rope = settings(config)
    speeds, amplitude = _speeds(rope, dim)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * speeds
    return angles.cos() * amplitude, angles.sin() * amplitude


def softmax_factor(config: Config) -> float:
    """What multiplies the scale of latent attention's softmax: YaRN's magnitude, squared."""
    rope = settings(config)
    if rope["kind"] == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    return _magnitude(rope["factor"], rope["mscale_all_dim"]) ** 2


def turn_halves(x: Tensor, by: Table) -> Tensor:
    """Heads [n, heads, width], their value i turned with value i + dim / 2; values beyond dim stay."""
    cos, sin = (each[:, None] for each in by)
    dim = 2 * cos.shape[-1]
    a, b, rest = x[..., : dim // 2], x[..., dim // 2 : dim], x[..., dim:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def turn_pairs(x: Tensor, by: Table) -> Tensor:
    """Heads [n, heads, dim], value 2 i turned with value 2 i + 1."""
    cos, sin = (each[:, None] for each in by)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def _speeds(rope: Mapping[str, Any], dim: int) -> tuple[Tensor, float]:
    """(radians per position [dim / 2], factor of cosines and sines)."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    plain = rope["theta"] ** -exponents
    if rope["kind"] == "default":
        return plain, 1.0
    factor = rope["factor"]
    if rope["kind"] == "linear":
        return plain / factor, 1.0
    if rope["kind"] == "llama3":
        return _llama3(plain, rope), 1.0
    assert rope["kind"] == "yarn", rope["kind"]
    ramp = _yarn_ramp(rope, dim)
    return plain * (1 - ramp) + plain / factor * ramp, _yarn_amplitude(rope)


def _llama3(plain: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Waves longer than original / low are stretched, shorter than original / high not, between: blended."""
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / rope["factor"]


def _yarn_ramp(rope: Mapping[str, Any], dim: int) -> Tensor:
    """How much of each frequency is interpolated [dim / 2]: 0 for fast ones, 1 for slow ones."""
    original, theta = rope["original_max_position_embeddings"], rope["theta"]

    def index(turns: float) -> float:
        """Where the frequency is that turns so often in the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = index(rope.get("beta_fast") or 32), index(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if last != first else 0.001
    return ((torch.arange(dim // 2, dtype=torch.float64) - first) / width).clamp(0, 1)


def _yarn_amplitude(rope: Mapping[str, Any]) -> float:
    factor = rope["factor"]
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return _magnitude(factor, rope["mscale"]) / _magnitude(factor, rope["mscale_all_dim"])
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, slope: float) -> float:
    return 0.1 * slope * math.log(factor) + 1 if factor > 1 else 1.0
