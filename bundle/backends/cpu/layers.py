"""FP8 by emulation: linear layers whose matrix products take what 8-bit numbers hold, as on a GPU.

With the refusals of Transformer Engine's layers.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings
from torch import Tensor

from bundle.backends.cpu.scaling import (
    ForwardPassPurpose,
    LayerQuantisers,
    build_quantisers,
    find_forward_or_recompute_phase,
)
from bundle.errors import JobFailed
from bundle.fp8 import SCALINGS
from bundle.mcore import filter_keywords
from bundle.recipe.recipe import FP8


@cache
def make_fp8_layer(base: type, fp8: FP8) -> type:
    """Return the class of the linear layer `base` with FP8 products.

    It compares equal to `base`, so that megatron's specs take it for `base`.
    """
    return _EqualToBase(f"Fp8{base.__name__}", (_Fp8Linear, base), {"fp8": fp8})


class _EqualToBase(type):
    """Megatron asks `linear_q_down_proj in [TELinear]`, and TELinear on cpu is our duplicated layer."""

    def __eq__(cls, other: object) -> bool:
        return cls is other or any(base is other for base in cls.__bases__)

    __hash__ = type.__hash__


class _Fp8Linear:
    """Stands before a linear layer of megatron and takes the place of its `_forward_impl`."""

    fp8: FP8
    config: Any
    training: bool

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        # Megatron's own choice of the group that Transformer Engine shares amaxes in.
        group = parallel_state.get_amax_reduction_group(with_context_parallel=True)
        self._quantisers = build_quantisers(self.fp8, group)
        self._pads_rows = bool(options.get("is_expert"))  # so do Transformer Engine's grouped layers
        self._name = options.get("tp_comm_buffer_name") or type(self).__name__

    @property
    def _forward_impl(self) -> Callable[..., Tensor]:
        return self._multiply

    @_forward_impl.setter
    def _forward_impl(self, function: Any) -> None:
        """Ignore the assignment: 0.12 and 0.13 choose between two functions in every forward pass."""

    def get_extra_state(self) -> Any:
        """Return what checkpoints keep beside the weights. Megatron and Transformer Engine name it so."""
        return self._quantisers.get_delayed_state()

    def set_extra_state(self, state: Any) -> None:
        """Restore what `get_extra_state` returned; a checkpoint of a model without FP8 has None here."""
        self._quantisers.restore(state or [])

    def _multiply(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        **fusions: Any,
    ) -> Tensor:
        """Return [..., out], the weight times the input of all tensor-parallel ranks that share the sequence.

        The input is gathered before it is rounded. Transformer Engine rounds each rank's part by one scale
        for all ranks, and gathers the result.
        """
        gather = mappings.gather_from_sequence_parallel_region
        copy = mappings.copy_to_tensor_model_parallel_region
        if sequence_parallel:
            input = gather(input, **filter_keywords(gather, group=tp_group))
        elif allreduce_dgrad:
            input = copy(input, **filter_keywords(copy, group=tp_group))
        self._refuse_sizes(input, weight)
        return multiply_in_fp8(
            input, weight, bias, self._quantisers, find_forward_or_recompute_phase(training=self.training)
        )

    def _refuse_sizes(self, x: Tensor, weight: Tensor) -> None:
        multiple, source = SCALINGS[self.fp8.scaling].row_multiple, SCALINGS[self.fp8.scaling].source
        outputs, inputs = weight.shape
        resize = "change the model's sizes or parallel.tp"
        sizes = [("input features", inputs, resize), ("output features", outputs, resize)]
        if not self._pads_rows:
            rows = math.prod(x.shape[:-1])
            sizes.append(("rows", rows, "pad the tokens with recipe.alignment and this scaling (Packing)"))
        wrong = [
            f"{size} {size_name} on this rank: {change}"
            for size_name, size, change in sizes
            if size % multiple
        ]
        if wrong:
            raise JobFailed(
                f"{self.fp8.scaling} FP8 needs multiples of {multiple} ({source}). Layer {self._name},"
                f" input {list(x.shape)}, weight {list(weight.shape)}:",
                wrong,
            )


def multiply_in_fp8(
    x: Tensor, weight: Tensor, bias: Tensor | None, quantisers: LayerQuantisers, phase: ForwardPassPurpose
) -> Tensor:
    """Return [..., out]: `x` [..., in] times `weight` [out, in] transposed, plus `bias` [out].

    The result has the dtype of `x`. Operands are rounded to FP8, sums are float32 (the tensor cores'
    accumulators), results have the dtype of the operand; a bias is never rounded.
    """
    y: Tensor = _Fp8Matmul.apply(x.reshape(-1, x.shape[-1]), weight, bias, quantisers, phase)
    return y.view(*x.shape[:-1], weight.shape[0])


class _Fp8Matmul(torch.autograd.Function):
    """Keeps the operands as they came, like megatron's own function, and rounds them again when needed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        quantisers: LayerQuantisers,
        phase: ForwardPassPurpose,
    ) -> Tensor:
        round_x, round_weight = quantisers.input(x.float(), phase), quantisers.weight(weight.float(), phase)
        ctx.save_for_backward(x, weight)
        ctx.roundings, ctx.gradient, ctx.biased = (
            (round_x, round_weight),
            quantisers.gradient,
            bias is not None,
        )
        y = round_x(x.float(), 1) @ round_weight(weight.float(), 1).t()
        return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        round_x, round_weight = ctx.roundings
        g = gradient.float()
        round_gradient = ctx.gradient(g, ForwardPassPurpose.TRAINED)
        d_x = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            d_x = (round_gradient(g, 1) @ round_weight(weight.float(), 0)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            d_weight = (round_gradient(g, 0).t() @ round_x(x.float(), 0)).to(weight.dtype)
        if ctx.biased and ctx.needs_input_grad[2]:
            d_bias = gradient.sum(0)
        return d_x, d_weight, d_bias, None, None
