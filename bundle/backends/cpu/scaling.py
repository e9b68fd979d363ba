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
AMAX_HISTORY_LENGTH = 1024  # amax_history_len of transformer_engine's DelayedScaling; its margin is 0

# (largest values, FP8 dtype) -> what values are multiplied by before they are rounded.
Scale = Callable[[Tensor, torch.dtype], Tensor]

_EXPONENT, _MANTISSA = -0x800000, 0x7FFFFF  # the bits of a float32 (sign included in the first)


def compute_exact_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale that takes `amax` to the largest number of `dtype`; float32, as all scales."""
    scale = (torch.finfo(dtype).max / amax).clamp(max=torch.finfo(torch.float32).max)
    return torch.where(torch.isfinite(amax) & (amax > 0), scale, 1.0)


def compute_power_of_two_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the exact scale, rounded down to a power of two."""
    return (compute_exact_scale(amax, dtype).view(torch.int32) & _EXPONENT).view(torch.float32)


def compute_e8m0_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the inverse of (amax / largest number of `dtype`, rounded up to a power of two)."""
    ratio = (amax * (1.0 / torch.finfo(dtype).max)).clamp(min=torch.finfo(torch.float32).tiny)
    upper = ((ratio.view(torch.int32) + _MANTISSA) & _EXPONENT).view(torch.float32)
    return torch.where(torch.isfinite(amax) & (amax > 0), upper.reciprocal(), 1.0)


def find_amax(x: Tensor) -> Tensor:
    """Return the largest magnitude in `x`; 0 for an empty tensor (an expert without tokens)."""
    return x.abs().amax() if x.numel() else x.new_zeros(())


def fake_quantize_to_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x`, float32, rounded to numbers of `dtype` under `scale`: to nearest, ties to even."""
    limit = torch.finfo(dtype).max
    return (x * scale).clamp(-limit, limit).to(dtype).to(torch.float32) * scale.reciprocal()


def round_blocks_to_fp8(x: Tensor, block: tuple[int, int], scale: Scale, dtype: torch.dtype) -> Tensor:
    """Return `x` [rows, columns] rounded with a scale for every block of (rows, columns).

    The last blocks may be smaller.
    """
    (rows, columns), (block_rows, block_columns) = x.shape, block
    padded = F.pad(x, (0, -columns % block_columns, 0, -rows % block_rows))
    tiles = padded.reshape(
        padded.shape[0] // block_rows, block_rows, padded.shape[1] // block_columns, block_columns
    )
    scales = scale(tiles.abs().amax((1, 3), keepdim=True), dtype)
    return fake_quantize_to_fp8(tiles, scales, dtype).reshape(padded.shape)[:rows, :columns]


class ForwardPassPurpose(Enum):
    """What a forward pass through a layer is for."""

    TRAINED = auto()
    CHECKPOINTED = auto()  # its activations are dropped: it will be computed again
    RECOMPUTED = auto()
    EVALUATED = auto()


def find_forward_or_recompute_phase(*, training: bool) -> ForwardPassPurpose:
    """Return the phase of the forward pass that is running; `training` is the module's.

    Megatron's checkpoints run the first pass without gradients, and the second one inside the backward pass.
    """
    if context.is_in_backward():
        return ForwardPassPurpose.RECOMPUTED
    if not training:
        return ForwardPassPurpose.EVALUATED
    return ForwardPassPurpose.TRAINED if torch.is_grad_enabled() else ForwardPassPurpose.CHECKPOINTED


class DelayedQuantiser:
    """The quantiser of one operand: scale 1 at first, then by the largest value of the last 1024 calls.

    As Transformer Engine's: `group` (megatron's amax reduction group) shares each call's largest value, a
    call with nothing but zeros or with an infinity leaves the scale as it was, recomputation uses the scale
    of the pass that it repeats, and evaluation changes nothing.
    """

    def __init__(self, dtype: torch.dtype, group: dist.ProcessGroup | None) -> None:
        self.dtype, self.group = dtype, group
        self.scale = torch.ones(())
        self.history: deque[float] = deque(maxlen=AMAX_HISTORY_LENGTH)
        self._pending_scales: deque[Tensor] = deque()

    def __call__(self, x: Tensor, phase: ForwardPassPurpose) -> Callable[[Tensor, int], Tensor]:
        """Return a function that rounds `x` by this call's scale in both products, even after later calls."""
        scale = self._get_scale_and_advance(x, phase)
        return lambda x, summed_dim: fake_quantize_to_fp8(x, scale, self.dtype)

    def _get_scale_and_advance(self, x: Tensor, phase: ForwardPassPurpose) -> Tensor:
        scale = self._pending_scales.popleft() if phase is ForwardPassPurpose.RECOMPUTED else self.scale
        if phase is ForwardPassPurpose.CHECKPOINTED:
            self._pending_scales.append(scale)
        if phase in (ForwardPassPurpose.CHECKPOINTED, ForwardPassPurpose.TRAINED):
            self._update_history_and_scale(self._find_group_amax(x))
        return scale

    def _find_group_amax(self, x: Tensor) -> float:
        amax = find_amax(x)
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self.group)
        return float(amax)

    def _update_history_and_scale(self, amax: float) -> None:
        self.history.append(amax)
        latest = torch.tensor(max(self.history))
        if 0 < latest < torch.inf:
            self.scale = compute_exact_scale(latest, self.dtype)


class FirstMicroBatchWeightQuantiser(DelayedQuantiser):
    """The quantiser of a weight: cast by the first micro-batch of a schedule's run, for all of that run.

    As Transformer Engine's `is_first_microbatch`, which megatron's schedules set: later micro-batches, and
    every recomputation, multiply by the copy that the first one made. They still take a row of the history
    each, one of zero, so that a weight's largest value is forgotten when an input's would be.
    """

    def __init__(self, dtype: torch.dtype, group: dist.ProcessGroup | None) -> None:
        super().__init__(dtype, group)
        self._run: object | None = None
        self._run_scale = self.scale

    def _get_scale_and_advance(self, x: Tensor, phase: ForwardPassPurpose) -> Tensor:
        run = context.schedule_run.get()
        if run is None or phase is ForwardPassPurpose.EVALUATED:
            return super()._get_scale_and_advance(x, phase)
        if run is not self._run:
            self._run, self._run_scale = run, self.scale
            self._update_history_and_scale(self._find_group_amax(x))
        elif phase is not ForwardPassPurpose.RECOMPUTED:
            self._update_history_and_scale(0.0)
        return self._run_scale


# (matrix, the dimension that the product sums over) -> the matrix as FP8 holds it, float32
Rounding = Callable[[Tensor, int], Tensor]
# What rounds one matrix in all products that it takes part in: forward, and backward later.
Quantiser = Callable[[Tensor, ForwardPassPurpose], Rounding]


@dataclass(frozen=True)
class LayerQuantisers:
    """The quantisers of one layer."""

    input: Quantiser
    weight: Quantiser
    gradient: Quantiser

    def get_delayed_state(self) -> list[tuple[Tensor, list[float]]]:
        """Return what a checkpoint needs to continue alike: scale and history of every delayed operand."""
        return [(operand.scale, list(operand.history)) for operand in self._list_delayed()]

    def restore(self, state: list[tuple[Tensor, list[float]]]) -> None:
        """Restore what `get_delayed_state` returned; it is empty for a model without delayed scaling."""
        for operand, (scale, history) in zip(self._list_delayed(), state, strict=False):
            operand.scale = scale
            operand.history.extend(history)

    def _list_delayed(self) -> list[DelayedQuantiser]:
        return [
            quantiser
            for quantiser in (self.input, self.weight, self.gradient)
            if isinstance(quantiser, DelayedQuantiser)
        ]


def build_quantisers(fp8: FP8, amax_group: dist.ProcessGroup | None) -> LayerQuantisers:
    """Return the quantisers of one layer under a recipe.

    Delayed quantisers keep a history, and share amaxes in `amax_group`.
    """
    backward = E5M2 if fp8.format == "hybrid" else E4M3
    dtypes = (E4M3, E4M3, backward)
    if fp8.scaling == "delayed":
        kinds = (DelayedQuantiser, FirstMicroBatchWeightQuantiser, DelayedQuantiser)
        return LayerQuantisers(*(kind(dtype, amax_group) for kind, dtype in zip(kinds, dtypes, strict=True)))
    if fp8.scaling == "tensorwise":
        return LayerQuantisers(*(partial(_build_tensorwise_rounding, dtype) for dtype in dtypes))
    if fp8.scaling == "blockwise":
        scale, along, across = compute_power_of_two_scale, 128, (1, 128, 1)
    else:
        scale, along, across = compute_e8m0_scale, 32, (1, 1, 1)
    return LayerQuantisers(
        *(
            partial(_build_block_rounding, dtype, scale, along, wide)
            for dtype, wide in zip(dtypes, across, strict=True)
        )
    )


def _build_tensorwise_rounding(dtype: torch.dtype, x: Tensor, phase: ForwardPassPurpose) -> Rounding:
    scale = compute_exact_scale(find_amax(x), dtype)
    return lambda x, summed_dim: fake_quantize_to_fp8(x, scale, dtype)


def _build_block_rounding(
    dtype: torch.dtype, scale: Scale, along: int, across: int, x: Tensor, phase: ForwardPassPurpose
) -> Rounding:
    """Return the rounding of a matrix, done anew on `x` itself for each dimension that is summed over."""

    def round_matrix(x: Tensor, summed_dim: int) -> Tensor:
        block = (across, along) if summed_dim == 1 else (along, across)
        return round_blocks_to_fp8(x, block, scale, dtype)

    return round_matrix
