"""The low-rank product beside one of megatron's linear layers, with that layer's own communication.

In a column-parallel layer A is whole on every rank, and B has the rank's rows. In a row-parallel one A has
the rank's columns, and B is whole. The tensors that ranks exchange are as narrow as the adapter. Under
sequence parallelism a rank sees a part of the tokens, and has that part of the gradient of a whole matrix.
Megatron sums these over tp, by its own mark.

An expert's layers exchange nothing themselves. The dispatcher brings all tokens to every
expert-tensor-parallel rank and adds up the ranks' outputs, forward and backward. There each rank has its
addend of the gradient of a whole matrix, and the addends are summed here.

DoRA (Liu et al., 2024) also multiplies each row of the adapted weight by its magnitude / its norm. Magnitudes
are cut and marked as the rows of B are.

Dropout follows PEFT: each pair drops values of its own input, in training only. Ranks that see the same input
drop the same values; ranks that see parts of it drop others.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from torch import Tensor
from torch.distributed import ProcessGroup

from bundle.mcore.groups import fork_dropout_rng


class LowRankPair(NamedTuple):
    """A [rank, in], B [out, rank] and DoRA's magnitude [out] of one weight, or this rank's parts of them."""

    a: torch.nn.Parameter
    b: torch.nn.Parameter
    magnitude: torch.nn.Parameter | None = None


class LowRankDelta(torch.nn.Module):
    """The product of low-rank pairs that is added to the output of one linear layer.

    The layer may be one weight or all experts of a rank. The output holds several published weights' outputs:
    `repeats` times one piece of each, `widths` wide.
    """

    def __init__(
        self,
        pairs_by_expert: Sequence[Sequence[LowRankPair | None]],
        base_weights: Sequence[Tensor],
        widths: Sequence[int],
        repeats: int,
        *,
        scale: float,
        dropout: float,
        dim: int | None,
        group: ProcessGroup,
        is_expert: bool,
        sequence_parallel: bool,
    ) -> None:
        """Register the pairs of the layer, whose own weights are `base_weights`.

        `pairs_by_expert`: for each weight of the layer its pairs, None where a published weight has none. All
        have one rank. `dim` of the weights is cut between `group`'s ranks.
        """
        super().__init__()
        self._pairs: list[list[LowRankPair | None]] = [list(pairs) for pairs in pairs_by_expert]
        self._base_weights = list(base_weights)  # in a list, which registers nothing
        for expert_index, pairs in enumerate(self._pairs):
            for number, pair in enumerate(pairs):
                if pair is not None:
                    self.register_parameter(f"lora_A{number}_{expert_index}", pair.a)
                    self.register_parameter(f"lora_B{number}_{expert_index}", pair.b)
                    self.register_parameter(f"magnitude{number}_{expert_index}", pair.magnitude)
        self._adapted_indices = [n for n in range(len(widths)) if any(pairs[n] for pairs in self._pairs)]
        self._widths, self._repeats, self._scale = tuple(widths), repeats, scale
        self._dropout = dropout
        self.is_disabled = False  # whether it adds nothing for now
        self._dim, self._group, self._is_expert = dim, group, is_expert
        self._sequence_parallel = sequence_parallel and not is_expert

    def forward(
        self, output: Tensor, bias: Tensor | None, x: Tensor, counts: Sequence[int] | None = None
    ) -> Tensor:
        """Return the layer's output [..., out] for `x` [..., in] with the adapter: the part of this rank.

        `output` has the layer's `bias` in it, and its memory is overwritten. `counts`: the number of rows of
        each expert, where there are several; they lie one behind the other.
        """
        multiply = _make_multiply(x, counts)
        a = torch.cat([self._stack_expert_matrices("a", number) for number in self._adapted_indices], 1)
        if self._is_expert and self._dim == 0:
            a = sum_gradient_in_backward(a, self._group)
        low = self._exchange(self._project_down_with_dropout(x, a, multiply) * self._scale)
        b = self._build_block_matrix()
        if counts is None:
            adapted: Tensor = _AddedProduct.apply(output, low, b[0])
        else:
            adapted = output + multiply(low, b)
        if not self._magnitudes:
            return adapted
        # The ratio is near 1, and bf16 has more digits of the difference.
        excess = (self._compute_magnitude_norm_ratios(range(len(self._pairs))) - 1).to(adapted.dtype)
        if counts is None:
            excess = excess[0]
        else:
            repeats = torch.tensor(counts, device=excess.device)
            excess = excess.repeat_interleave(repeats, 0, output_size=len(adapted))
        return torch.addcmul(adapted, adapted if bias is None else adapted - bias, excess)

    def _build_block_matrix(self) -> Tensor:
        """Return every B in one matrix [experts, out, k], for narrow products that lie side by side.

        A row of one published weight has zeros in the columns of the others.
        """
        matrices = {number: self._stack_expert_matrices("b", number) for number in self._adapted_indices}
        if self._is_expert and self._dim == 1:
            matrices = {n: sum_gradient_in_backward(b, self._group) for n, b in matrices.items()}
        first = matrices[self._adapted_indices[0]]
        rank, blocks = first.shape[-1], []
        for number, width in enumerate(self._widths):
            if number in matrices:
                before = self._adapted_indices.index(number)
                columns = (before * rank, (len(matrices) - 1 - before) * rank)
                blocks.append(F.pad(matrices[number], columns).unflatten(1, (self._repeats, width)))
            else:
                blocks.append(first.new_zeros(len(first), self._repeats, width, len(matrices) * rank))
        return torch.cat(blocks, 2).flatten(1, 2)

    def merge_into(self, weight: Tensor, expert: int) -> Tensor:
        """Return this expert's weight with the adapter: [out, in] in fp32, this rank's part.

        With magnitudes all ranks that the weight is cut between call it.
        """
        deltas = [pair and pair.b.float() @ pair.a.float() * self._scale for pair in self._pairs[expert]]
        merged = weight.float() + self._interleave_fused_rows(deltas, 0.0, weight.shape[1:])
        return merged * self._compute_magnitude_norm_ratios([expert]).mT if self._magnitudes else merged

    def initialize_magnitudes(self) -> None:
        """Fill magnitudes with the norms of the rows, as PEFT does. All ranks of the group call it."""
        if self._magnitudes:
            norms = self._compute_row_norms(range(len(self._pairs)))
            for magnitude, values in zip(self._magnitudes, norms, strict=True):
                magnitude.data.copy_(values)

    @property
    def _magnitudes(self) -> list[torch.nn.Parameter]:
        pairs = (pair for expert_pairs in self._pairs for pair in expert_pairs)
        return [pair.magnitude for pair in pairs if pair and pair.magnitude is not None]

    def _compute_magnitude_norm_ratios(self, experts: Sequence[int]) -> Tensor:
        """Return magnitude / norm of every row of these experts' weights: [experts, out], fp32.

        A row without an adapter has 1.
        """
        norms = iter(self._compute_row_norms(experts))

        def divide(magnitude: Tensor) -> Tensor:
            if self._is_expert and self._dim == 1:
                magnitude = sum_gradient_in_backward(magnitude, self._group)
            return magnitude.float() / next(norms)

        ratios = [
            [None if pair is None or pair.magnitude is None else divide(pair.magnitude) for pair in pairs]
            for pairs in map(self._pairs.__getitem__, experts)
        ]
        return torch.stack([self._interleave_fused_rows(expert_ratios, 1.0) for expert_ratios in ratios])

    def _compute_row_norms(self, experts: Iterable[int]) -> list[Tensor]:
        """Return the norms of the rows of each adapted weight plus its delta, [out] in fp32.

        The delta is not multiplied out. No gradient goes to the norms.
        """
        squares = []
        for expert in experts:
            pieces = (
                self._base_weights[expert].detach().unflatten(0, (self._repeats, -1)).split(self._widths, 1)
            )
            for piece, pair in zip(pieces, self._pairs[expert], strict=True):
                if pair is None:
                    continue
                a, b = pair.a.detach().float(), pair.b.detach().float()
                weight_squares = torch.linalg.vector_norm(piece, dim=-1, dtype=torch.float).square().flatten()
                cross = (F.linear(piece, pair.a.detach()).flatten(0, 1).float() * b).sum(-1)
                squares.append(
                    weight_squares + 2 * self._scale * cross + self._scale**2 * (b @ (a @ a.mT) * b).sum(-1)
                )
        joined = torch.cat(squares)
        if self._dim == 1 and self._group.size() > 1:
            dist.all_reduce(joined, group=self._group)
        smallest = torch.finfo(joined.dtype).tiny  # rounding may leave less than 0
        return list(joined.clamp(min=smallest).sqrt().split([len(rows) for rows in squares]))

    def _interleave_fused_rows(
        self, parts: Sequence[Tensor | None], default: float, shape: Sequence[int] = ()
    ) -> Tensor:
        """Return rows of this shape of the published weights, in fp32, as rows of the layer's weight."""
        pieces = [
            self._base_weights[0].new_full((self._repeats, width, *shape), default, dtype=torch.float)
            if part is None
            else part.unflatten(0, (self._repeats, width))
            for width, part in zip(self._widths, parts, strict=True)
        ]
        return torch.cat(pieces, 1).flatten(0, 1)

    def _project_down_with_dropout(
        self, x: Tensor, a: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Return the products of `x` and every A side by side; in training each has its own dropout."""
        if not (self.training and self._dropout):
            return multiply(x, a)
        parts = a.chunk(len(self._adapted_indices), 1)
        with self._fork_dropout_rng():
            inputs = [F.dropout(x, self._dropout) for _ in parts]
        return torch.cat([multiply(rows, part) for rows, part in zip(inputs, parts, strict=True)], -1)

    def _fork_dropout_rng(self) -> AbstractContextManager[None]:
        """Return the random state of dropout, which is the same on ranks that see the same input."""
        is_same_input = self._dim != 1 and not self._sequence_parallel
        return fork_dropout_rng(is_expert=self._is_expert, is_same=is_same_input)

    def _stack_expert_matrices(self, matrix: str, number: int) -> Tensor:
        """Return A or B of one published weight: [experts, ...]; zeros for an expert that has none."""
        matrices = [pair and getattr(pair, matrix) for pair in (pairs[number] for pairs in self._pairs)]
        template = next(item for item in matrices if item is not None)
        if len(matrices) == 1:
            return template[None]
        return torch.stack([torch.zeros_like(template) if item is None else item for item in matrices])

    def _exchange(self, low: Tensor) -> Tensor:
        """Return the narrow product after the exchange with the other ranks that the layer itself makes."""
        if self._is_expert or self._dim is None or self._group.size() == 1:
            return low
        mappings: Any = tensor_parallel
        if self._dim == 0:
            collective = (
                mappings.gather_from_sequence_parallel_region
                if self._sequence_parallel
                else mappings.copy_to_tensor_model_parallel_region
            )
        else:
            collective = (
                mappings.reduce_scatter_to_sequence_parallel_region
                if self._sequence_parallel
                else mappings.reduce_from_tensor_model_parallel_region
            )
        exchanged: Tensor = collective(low)
        return exchanged


class _AddedProduct(torch.autograd.Function):
    """The sum of an output [..., out] and the product of `low` [..., k] and the transposed `b` [out, k].

    One matrix product adds to the output's own memory, so that a large output is read and written once.
    Autograd is not told of it: `mark_dirty` raises an error for views, which outputs of Transformer Engine
    are. Nothing else reads the output of the layer.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, low: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(low, b)
        total = output.contiguous()
        total.flatten(0, -2).addmm_(low.flatten(0, -2), b.T)
        return total.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        low, b = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        return gradient, (rows @ b).view_as(low), rows.T @ low.flatten(0, -2)


def _make_multiply(x: Tensor, counts: Sequence[int] | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that multiplies rows like those of `x` by weights [experts, out, in].

    Each row is multiplied by the weight of its expert.
    """
    if counts is None:
        return lambda rows, weights: F.linear(rows, weights[0])
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, pin_memory=x.is_cuda)
    ends = ends.to(x.device, non_blocking=True)

    def multiply(rows: Tensor, weights: Tensor) -> Tensor:
        # One kernel, where torch (2.10) has it: in bf16, with rows of a multiple of 16 bytes.
        is_aligned = not any(size % 8 for size in weights.shape[1:])
        if hasattr(F, "grouped_mm") and rows.dtype == torch.bfloat16 and is_aligned and len(rows):
            return F.grouped_mm(rows, weights.mT, offs=ends)
        rows_and_weights = zip(rows.split(list(counts)), weights, strict=True)
        return torch.cat([F.linear(expert_rows, weight) for expert_rows, weight in rows_and_weights])

    return multiply


def attach(adapter: LowRankDelta, layer: torch.nn.Module) -> None:
    """Make a linear layer also return what the adapter adds.

    The layer is torch's, or megatron's, which returns (output, bias). A layer that is all experts of a rank
    is told how many rows each has. Where Transformer Engine has folded the norm into the layer, the layer is
    asked to return the normalized input.
    """
    has_folded_norm = hasattr(layer, "return_layernorm_output")
    if has_folded_norm:
        untyped_layer: Any = layer
        untyped_layer.return_layernorm_output = True

    def add(_: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        bias: Tensor | None = getattr(layer, "bias", None)
        if isinstance(output, Tensor):
            return output if adapter.is_disabled else adapter(output, bias, *arguments)
        result, *rest = output
        x, *counts = arguments
        if has_folded_norm and isinstance(result, tuple):
            result, x = result
        elif has_folded_norm:
            x = rest.pop()  # behind the bias that the caller adds
        if rest[0] is not None or (bias is not None and not bias.numel()):
            bias = None  # the caller adds it, or Transformer Engine has none
        return (result if adapter.is_disabled else adapter(result, bias, x, *counts), *rest)

    layer.register_forward_hook(add)


def has_loraplus_rate(name: str) -> bool:
    """Return whether LoRA+ changes the learning rate of the parameter of this name."""
    return name.rpartition(".")[2].startswith(("lora_B", "magnitude"))


def require_output_grad(embedding: torch.nn.Module) -> None:
    """Make the output of a frozen embedding ask for its gradient.

    Recomputation gives no gradient to the weights inside it where no input asks for one.
    """

    def require_grad(_: torch.nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() else output

    embedding.register_forward_hook(require_grad)


def set_zero_main_grad(embedding: torch.Tensor) -> None:
    """Make the first and the last stage add up a zero in the place of a frozen embedding's gradient.

    0.12 adds up the gradient of an embedding that both hold without checking whether it has one.
    """
    frozen: Any = embedding
    frozen.main_grad = embedding.new_zeros(1)


def set_parallel_attributes(
    parameter: torch.nn.Parameter,
    *,
    is_cut: bool,
    group: ProcessGroup,
    is_expert: bool,
    sequence_parallel: bool,
    allreduce: bool,
) -> None:
    """Set the attributes by which megatron knows the parts of a parameter and who sums its gradient.

    `is_cut`: each rank of `group` has a part of its own. `allreduce`: whether its gradient is summed over dp
    x cp rather than between the ranks that have the same experts. The norm of the gradient counts a parameter
    that is whole on all ranks of tp at the first of them. That does not apply to an expert's parameters,
    which are counted by `shared`.
    """
    marked: Any = parameter
    marked.allreduce = allreduce
    marked.sequence_parallel = sequence_parallel and not is_expert and not is_cut
    marked.tensor_model_parallel = is_cut or is_expert
    if is_expert and not is_cut and group.rank() > 0:
        marked.shared = True


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def sum_gradient_in_backward(parameter: Tensor, group: ProcessGroup) -> Tensor:
    """Return the parameter; its gradient becomes the sum of the gradients of all ranks of the group."""
    if group.size() == 1:
        return parameter
    summed: Tensor = _SummedGradient.apply(parameter, group)
    return summed
