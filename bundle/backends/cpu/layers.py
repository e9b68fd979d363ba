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

from bundle.backends.cpu.scaling import Operands, Phase, operands, phase_of
from bundle.errors import JobFailed
from bundle.fp8 import SCALINGS
from bundle.mcore import known
from bundle.recipe.recipe import FP8


@cache
def in_fp8(base: type, fp8: FP8) -> type:
    """The linear layer `base` with FP8 products; equal to `base` in the eyes of megatron's specs."""
    return _SameAsBase(f"Fp8{base.__name__}", (_Products, base), {"fp8": fp8})


class _SameAsBase(type):
    """Megatron asks `linear_q_down_proj in [TELinear]`, and TELinear on cpu is our duplicated layer."""

    def __eq__(cls, other: object) -> bool:
        return cls is other or any(base is other for base in cls.__bases__)

    __hash__ = type.__hash__


class _Products:
    """Stands before a linear layer of megatron and takes the place of its `_forward_impl`."""

    fp8: FP8
    config: Any
    training: bool

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        # Megatron's own choice of the group that Transformer Engine shares amaxes in.
        group = parallel_state.get_amax_reduction_group(with_context_parallel=True)
        self._operands = operands(self.fp8, group)
        self._pads_rows = bool(options.get("is_expert"))  # so do Transformer Engine's grouped layers
        self._name = options.get("tp_comm_buffer_name") or type(self).__name__

    @property
    def _forward_impl(self) -> Callable[..., Tensor]:
        return self._multiply

    @_forward_impl.setter
    def _forward_impl(self, theirs: Any) -> None:
        """0.12 and 0.13 choose between two functions here, in every forward pass."""

    def get_extra_state(self) -> Any:
        """What checkpoints keep beside the weights (megatron's and Transformer Engine's name for it)."""
        return self._operands.state()

    def set_extra_state(self, state: Any) -> None:
        """Takes that up; a checkpoint of a model without FP8 has None here."""
        self._operands.restore(state or [])

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
        """[..., out]: the input of all tensor-parallel ranks where they share the sequence, times the weight.

        Gathered before it is rounded: Transformer Engine rounds each rank's part and gathers that, by one
        scale for all of them.
        """
        share = mappings.gather_from_sequence_parallel_region
        copy = mappings.copy_to_tensor_model_parallel_region
        if sequence_parallel:
            input = share(input, **known(share, group=tp_group))
        elif allreduce_dgrad:
            input = copy(input, **known(copy, group=tp_group))
        self._refuse(input, weight)
        return product(input, weight, bias, self._operands, phase_of(training=self.training))

    def _refuse(self, x: Tensor, weight: Tensor) -> None:
        multiple, source = SCALINGS[self.fp8.scaling].rows, SCALINGS[self.fp8.scaling].source
        outputs, inputs = weight.shape
        resize = "change the model's sizes or parallel.tp"
        sizes = [("input features", inputs, resize), ("output features", outputs, resize)]
        if not self._pads_rows:
            rows = math.prod(x.shape[:-1])
            sizes.append(("rows", rows, "pad the tokens by recipe.alignment with this scaling (Packing)"))
        wrong = [f"{size} {what} on this rank: {change}" for what, size, change in sizes if size % multiple]
        if wrong:
            raise JobFailed(
                f"{self.fp8.scaling} FP8 multiplies in multiples of {multiple} ({source}). Layer"
                f" {self._name}, input {list(x.shape)}, weight {list(weight.shape)}:",
                wrong,
            )


def product(x: Tensor, weight: Tensor, bias: Tensor | None, operands: Operands, phase: Phase) -> Tensor:
    """`x` [..., in] times `weight` [out, in] transposed, plus `bias` [out]: [..., out], the dtype of `x`.

    Operands are rounded to FP8, sums are float32 (the tensor cores' accumulators), results have the dtype of
    the operand; a bias is never rounded.
    """
    y: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), weight, bias, operands, phase)
    return y.view(*x.shape[:-1], weight.shape[0])


class _Product(torch.autograd.Function):
    """Keeps the operands as they came, like megatron's own function, and rounds them again when needed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, operands: Operands, phase: Phase
    ) -> Tensor:
        of_x, of_weight = operands.input(x.float(), phase), operands.weight(weight.float(), phase)
        ctx.save_for_backward(x, weight)
        ctx.roundings, ctx.gradient, ctx.biased = (of_x, of_weight), operands.gradient, bias is not None
        y = of_x(x.float(), 1) @ of_weight(weight.float(), 1).t()
        return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.roundings
        g = gradient.float()
        of_gradient = ctx.gradient(g, Phase.TRAINED)
        d_x = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            d_x = (of_gradient(g, 1) @ of_weight(weight.float(), 0)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            d_weight = (of_gradient(g, 0).t() @ of_x(x.float(), 0)).to(weight.dtype)
        if ctx.biased and ctx.needs_input_grad[2]:
            d_bias = gradient.sum(0)
        return d_x, d_weight, d_bias, None, None
