"""All experts of a rank in one product, by npu_grouped_matmul, which has no gradient of its own."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from bundle.backends.ascend.operators import find_operator

MOST_MATRICES = 128  # in one call; one tensor of matrices may hold 1,024
# group_type: experts have rows of the left factor each, or parts of the dimension that is summed over.
BY_ROWS, BY_SUMMED = 0, 2
SINGLE_TENSOR_SPLIT_ITEM = 3  # split_item


class GroupedExperts(SequentialMLP):
    """Megatron's experts, weights and names, with the rows of all of them multiplied at once.

    One expert, and experts without a row, are computed as megatron does it.
    """

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Return [rows, h] from rows sorted by expert.

        `tokens_per_expert` has the number of rows of each expert, `permuted_probs` [rows] the weight of each
        row.
        """
        rows = permuted_local_hidden_states
        if self.num_local_experts == 1 or not len(rows):
            result: tuple[Tensor, None] = super().forward(rows, tokens_per_expert, permuted_probs)
            return result
        ends = tokens_per_expert.to(rows.device, torch.int64, non_blocking=True).cumsum(0)
        first, second = (
            [getattr(expert, name).weight for expert in self.local_experts] for name in _EXPERT_LINEAR_NAMES
        )
        gated = self._gate(multiply_by_experts(rows, first, ends), permuted_probs.unsqueeze(-1))
        return multiply_by_experts(gated, second, ends), None

    def _gate(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return silu of the first half times the second, times the router's weight."""
        if self.config.bias_activation_fusion:
            fused: Tensor = weighted_bias_swiglu_impl(rows, None, weights)
            return fused
        first, second = rows.chunk(2, -1)
        return (F.silu(first) * second * weights).to(rows.dtype)


_EXPERT_LINEAR_NAMES = ("linear_fc1", "linear_fc2")


def multiply_by_experts(rows: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
    """Return [rows, n]: rows [rows, k] times the weight [n, k] of their expert; differentiable in both.

    `ends` [experts] int64: the number of rows of this expert and those before it.
    """
    result: Tensor = _GroupedMatmul.apply(rows, ends, *weights)
    return result


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        rows = rows.contiguous()  # backward gives the operator its transpose, and it takes no other
        ctx.save_for_backward(rows, ends, *weights)
        return _multiply_grouped(rows, [weight.t() for weight in weights], ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, ends, *weights = ctx.saved_tensors
        gradient = gradient.contiguous()
        by_rows = _multiply_grouped(gradient, weights, ends) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return by_rows, None, *(None for _ in weights)
        (by_weights,) = find_operator("npu_grouped_matmul")(
            [gradient.t()], [rows], group_list=ends, split_item=SINGLE_TENSOR_SPLIT_ITEM, group_type=BY_SUMMED
        )
        return by_rows, None, *by_weights.unbind()


def _multiply_grouped(rows: Tensor, matrices: Sequence[Tensor], ends: Tensor) -> Tensor:
    """Return [rows, n], the rows times matrices [k, n].

    For float32 the operator takes one tensor of all matrices only; other dtypes are not copied.
    """
    if rows.dtype == torch.float32 or len(matrices) > MOST_MATRICES:
        matrices = [torch.stack(list(matrices))]
    (result,) = find_operator("npu_grouped_matmul")(
        [rows], list(matrices), group_list=ends, split_item=SINGLE_TENSOR_SPLIT_ITEM, group_type=BY_ROWS
    )
    output: Tensor = result
    return output
