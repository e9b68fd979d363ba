"""Scales, blocks and rounding: the numbers that remain of a matrix when FP8 holds it, as float32.

The scales of Transformer Engine's recipes (transformer_engine.common.recipe):
- DelayedScaling, Float8CurrentScaling: one float32 scale for a tensor, largest FP8 number / largest value.
- Float8BlockScaling: that scale rounded down to a power of two, for 1 x 128 values of activations and
  gradients along the dimension that the product sums over, for 128 x 128 values of weights.
- MXFP8BlockScaling: powers of two (E8M0), for 32 values along that dimension. The exponent is rounded up, so
  that the largest value fits; the OCP formula rounds it down and lets values saturate.
What every recipe does: values beyond the range become the largest FP8 number, NaN stays, and a scale that
cannot be had (nothing but zeros, or an infinity) is 1.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# (largest values, FP8 dtype) -> what values are multiplied by before they are rounded.
Scale = Callable[[Tensor, torch.dtype], Tensor]

_EXPONENT, _MANTISSA = -0x800000, 0x7FFFFF  # the bits of a float32 (sign included in the first)


def exact_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale that takes `amax` to the largest number of `dtype`; float32, as all scales."""
    scale = (torch.finfo(dtype).max / amax).clamp(max=torch.finfo(torch.float32).max)
    return torch.where(torch.isfinite(amax) & (amax > 0), scale, 1.0)


def power_of_two_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The exact scale, rounded down to a power of two."""
    return (exact_scale(amax, dtype).view(torch.int32) & _EXPONENT).view(torch.float32)


def e8m0_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of amax / largest, rounded up to a power of two."""
    ratio = (amax * (1.0 / torch.finfo(dtype).max)).clamp(min=torch.finfo(torch.float32).tiny)
    upper = ((ratio.view(torch.int32) + _MANTISSA) & _EXPONENT).view(torch.float32)
    return torch.where(torch.isfinite(amax) & (amax > 0), upper.reciprocal(), 1.0)


def largest(x: Tensor) -> Tensor:
    """The largest magnitude in `x`; 0 where there is none (an expert without tokens)."""
    return x.abs().amax() if x.numel() else x.new_zeros(())


def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` as `dtype` holds it under `scale`, to nearest, ties to even; float32."""
    limit = torch.finfo(dtype).max
    return (x * scale).clamp(-limit, limit).to(dtype).to(torch.float32) * scale.reciprocal()


def rounded_in_blocks(x: Tensor, block: tuple[int, int], scale: Scale, dtype: torch.dtype) -> Tensor:
    """`x` [rows, columns] with a scale for every block of (rows, columns); the last ones may be smaller."""
    (rows, columns), (high, wide) = x.shape, block
    whole = F.pad(x, (0, -columns % wide, 0, -rows % high))
    tiles = whole.reshape(whole.shape[0] // high, high, whole.shape[1] // wide, wide)
    scales = scale(tiles.abs().amax((1, 3), keepdim=True), dtype)
    return rounded(tiles, scales, dtype).reshape(whole.shape)[:rows, :columns]
