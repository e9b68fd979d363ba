"""How a scaling rounds the three operands of a linear layer: its input, its weight, its output's gradient."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from bundle.backends.cpu.runtime.fp8.delayed import Delayed, DelayedWeight, Phase
from bundle.backends.cpu.runtime.fp8.scales import (
    E4M3,
    E5M2,
    Scale,
    e8m0_scale,
    exact_scale,
    largest,
    power_of_two_scale,
    rounded,
    rounded_in_blocks,
)
from bundle.recipe.model import FP8

# (matrix, the dimension that the product sums over) -> the matrix as FP8 holds it, float32
Rounding = Callable[[Tensor, int], Tensor]
# What rounds one matrix in all products that it takes part in: forward, and backward later.
Quantiser = Callable[[Tensor, Phase], Rounding]


@dataclass(frozen=True)
class Operands:
    """The quantisers of one layer."""

    input: Quantiser
    weight: Quantiser
    gradient: Quantiser

    def state(self) -> list[tuple[Tensor, list[float]]]:
        """What a checkpoint must keep to go on alike: scale and history of every delayed operand."""
        return [(operand.scale, list(operand.history)) for operand in self._delayed()]

    def restore(self, state: list[tuple[Tensor, list[float]]]) -> None:
        """Takes up what `state` gave; that of a model without delayed scaling is empty."""
        for operand, (scale, history) in zip(self._delayed(), state, strict=False):
            operand.scale = scale
            operand.history.extend(history)

    def _delayed(self) -> list[Delayed]:
        return [each for each in (self.input, self.weight, self.gradient) if isinstance(each, Delayed)]


def operands(fp8: FP8, amax_group: dist.ProcessGroup | None) -> Operands:
    """The quantisers of one layer under a recipe; delayed ones remember, and share amaxes in `amax_group`."""
    backward = E5M2 if fp8.format == "hybrid" else E4M3
    dtypes = (E4M3, E4M3, backward)
    if fp8.scaling == "delayed":
        kinds = (Delayed, DelayedWeight, Delayed)
        return Operands(*(kind(dtype, amax_group) for kind, dtype in zip(kinds, dtypes, strict=True)))
    if fp8.scaling == "tensorwise":
        return Operands(*(partial(_current, dtype) for dtype in dtypes))
    if fp8.scaling == "blockwise":
        scale, along, across = power_of_two_scale, 128, (1, 128, 1)
    else:
        scale, along, across = e8m0_scale, 32, (1, 1, 1)
    return Operands(
        *(partial(_blocks, dtype, scale, along, wide) for dtype, wide in zip(dtypes, across, strict=True))
    )


def _current(dtype: torch.dtype, x: Tensor, phase: Phase) -> Rounding:
    now = exact_scale(largest(x), dtype)
    return lambda x, contracted: rounded(x, now, dtype)


def _blocks(dtype: torch.dtype, scale: Scale, along: int, across: int, x: Tensor, phase: Phase) -> Rounding:
    """Rounds the matrix itself, not its rounded form, once for each direction in which it is summed over."""

    def rounding(x: Tensor, contracted: int) -> Tensor:
        block = (across, along) if contracted == 1 else (along, across)
        return rounded_in_blocks(x, block, scale, dtype)

    return rounding
