"""Fills a model from (seed, parameter name): the same weights in every layout and release.

Megatron draws each rank's shard from that rank's random state, so that the same seed gives another model at
tp 2 than at tp 1. Here the whole tensor is drawn and the rank keeps its part: runs compare across layouts.
"""

import hashlib
import math
from collections.abc import Iterable

import torch

from bundle.models.naming import Named

# Projections back onto the residual stream are drawn narrower, as in GPT-2 and Megatron-LM.
_RESIDUAL = (".linear_proj.weight", ".linear_fc2.weight")


def initialize(named: Iterable[Named], *, seed: int, std: float, num_layers: int) -> None:
    """Overwrites each parameter in place: ones for norms, zeros for biases, normal draws for matrices.

    `std` is that of the matrices; residual projections get std / sqrt(2 * num_layers).
    """
    with torch.no_grad():
        for item in named:
            item.parameter.copy_(_values(item, seed, std, num_layers))


def _values(item: Named, seed: int, std: float, num_layers: int) -> torch.Tensor:
    """The local values of one parameter, float32, on the CPU (so that every device gets the same)."""
    if item.parameter.ndim == 1:
        fill = 0.0 if item.name.endswith("bias") else 1.0
        return torch.full(item.parameter.shape, fill)
    if item.name.endswith(_RESIDUAL):
        std /= math.sqrt(2 * num_layers)
    digest = hashlib.sha256(f"{seed}/{item.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") % 2**63)
    whole = torch.randn(item.whole_shape(), generator=generator) * std
    return whole if item.shard is None else item.shard.of(whole)
