"""FP8 scaling: the numbers that remain of each operand of a linear layer when FP8 holds it, as float32.

The scales of Transformer Engine's recipes (transformer_engine.common.recipe):
- DelayedScaling, Float8CurrentScaling: one float32 scale for a tensor, largest FP8 number / largest value.
- Float8BlockScaling: that scale rounded down to a power of two, for 1 x 128 values of activations and
  gradients along the dimension that the product sums over, for 128 x 128 values of weights.
- MXFP8BlockScaling: powers of two (E8M0), for 32 values along that dimension. The exponent is rounded up, so
  that the largest value fits; the OCP formula rounds it down and lets values saturate.
What every recipe does: values beyond the range become the largest FP8 number, NaN stays, and a scale that
cannot be had (nothing but zeros, or an infinity) is 1.

First numbers and their rounding, then delayed scales and what they remember, then a layer's three operands.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bundle.mcore import context
from bundle.recipe.recipe import FP8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HISTORY = 1024  # amax_history_len of transformer_engine's DelayedScaling; its margin is 0

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


class Phase(Enum):
    """What a forward pass through a layer is for."""

    TRAINED = auto()
    CHECKPOINTED = auto()  # its activations are dropped: it will be computed again
    RECOMPUTED = auto()
    EVALUATED = auto()


def phase_of(*, training: bool) -> Phase:
    """The phase of the forward pass that is running; `training` is the module's.

    Megatron's checkpoints run the first pass without gradients, and the second one inside the backward pass.
    """
    if context.in_backward():
        return Phase.RECOMPUTED
    if not training:
        return Phase.EVALUATED
    return Phase.TRAINED if torch.is_grad_enabled() else Phase.CHECKPOINTED


class Delayed:
    """The quantiser of one operand: scale 1 at first, then by the largest value of the last 1024 calls.

    As Transformer Engine's: `group` (megatron's amax reduction group) shares each call's largest value, a
    call with nothing but zeros or with an infinity leaves the scale as it was, recomputation uses the scale
    of the pass that it repeats, and evaluation changes nothing.
    """

    def __init__(self, dtype: torch.dtype, group: dist.ProcessGroup | None) -> None:
        self.dtype, self.group = dtype, group
        self.scale = torch.ones(())
        self.history: deque[float] = deque(maxlen=HISTORY)
        self._promised: deque[Tensor] = deque()

    def __call__(self, x: Tensor, phase: Phase) -> Callable[[Tensor, int], Tensor]:
        """Rounds `x` by this call's scale in both of its products, whatever calls come in between."""
        scale = self._scale_of(x, phase)
        return lambda x, contracted: rounded(x, scale, self.dtype)

    def _scale_of(self, x: Tensor, phase: Phase) -> Tensor:
        scale = self._promised.popleft() if phase is Phase.RECOMPUTED else self.scale
        if phase is Phase.CHECKPOINTED:
            self._promised.append(scale)
        if phase in (Phase.CHECKPOINTED, Phase.TRAINED):
            self._remember(self._largest_of_group(x))
        return scale

    def _largest_of_group(self, x: Tensor) -> float:
        amax = largest(x)
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self.group)
        return float(amax)

    def _remember(self, amax: float) -> None:
        self.history.append(amax)
        latest = torch.tensor(max(self.history))
        if 0 < latest < torch.inf:
            self.scale = exact_scale(latest, self.dtype)


class DelayedWeight(Delayed):
    """The quantiser of a weight: cast by the first micro-batch of a schedule's run, for all of that run.

    As Transformer Engine's `is_first_microbatch`, which megatron's schedules set: later micro-batches, and
    every recomputation, multiply by the copy that the first one made. They still take a row of the history
    each, one of zero, so that a weight's largest value is forgotten when an input's would be.
    """

    def __init__(self, dtype: torch.dtype, group: dist.ProcessGroup | None) -> None:
        super().__init__(dtype, group)
        self._run: object | None = None
        self._cast = self.scale

    def _scale_of(self, x: Tensor, phase: Phase) -> Tensor:
        run = context.run.get()
        if run is None or phase is Phase.EVALUATED:
            return super()._scale_of(x, phase)
        if run is not self._run:
            self._run, self._cast = run, self.scale
            self._remember(self._largest_of_group(x))
        elif phase is not Phase.RECOMPUTED:
            self._remember(0.0)
        return self._cast


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
