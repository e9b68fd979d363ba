"""The matrix products of a linear layer in FP8: forward, and both of the backward pass."""

from typing import Any

import torch
from torch import Tensor

from bundle.backends.cpu.runtime.fp8.delayed import Phase
from bundle.backends.cpu.runtime.fp8.operands import Operands


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
