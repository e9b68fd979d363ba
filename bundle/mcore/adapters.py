"""The low-rank product beside one of megatron's linear layers, with that layer's own communication.

A column-parallel layer: A is whole on every rank, B has the rank's rows; a row-parallel one: A has its
columns, B is whole. What ranks exchange is as narrow as the adapter. Under sequence parallelism a rank sees a
part of the tokens, and has that part of the gradient of what is whole: megatron sums these over tp, by its
own mark.

An expert's layers exchange nothing themselves: the dispatcher brings all tokens to every
expert-tensor-parallel rank and adds up what the ranks make of them, forward and backward. There each rank has
its addend of the gradient of what is whole, and they are summed here.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from torch import Tensor
from torch.distributed import ProcessGroup


class LowRank(NamedTuple):
    """A [rank, in] and B [out, rank] of one weight, as much of them as this rank has."""

    a: torch.nn.Parameter
    b: torch.nn.Parameter


class Adapter(torch.nn.Module):
    """What low-rank pairs add to the output of one linear layer.

    The layer's output holds several weights' outputs: `repeats` times one piece of each, `widths` wide.
    """

    def __init__(
        self,
        pairs: Sequence[LowRank | None],
        widths: Sequence[int],
        repeats: int,
        *,
        scale: float,
        dim: int | None,
        group: ProcessGroup,
        expert: bool,
        sequence_parallel: bool,
    ) -> None:
        """`pairs`: None for a weight without one; `dim` of the weights is cut between `group`'s ranks."""
        super().__init__()
        for number, pair in enumerate(pairs):
            if pair is not None:
                self.register_parameter(f"lora_A{number}", pair.a)
                self.register_parameter(f"lora_B{number}", pair.b)
        self._numbers = [number for number, pair in enumerate(pairs) if pair is not None]
        self._widths, self._repeats, self._scale = tuple(widths), repeats, scale
        self._dim, self._group, self._expert = dim, group, expert
        self._sequence_parallel = sequence_parallel and not expert

    def forward(self, x: Tensor) -> Tensor:
        """[..., out], as much of it as the layer gives for the same `x` [..., in]."""
        a = torch.cat([getattr(self, f"lora_A{number}") for number in self._numbers])
        if self._expert and self._dim == 0:
            a = summed_gradient(a, self._group)
        low = self._between(F.linear(x, a) * self._scale)
        parts = dict(zip(self._numbers, low.chunk(len(self._numbers), -1), strict=True))
        pieces = [self._piece(number, parts.get(number), low) for number in range(len(self._widths))]
        return torch.cat(pieces, -1).flatten(-2)

    def difference(self) -> Tensor:
        """What all of it adds to the layer's weight: [out, in] in fp32, as much as this rank has."""
        parts = []
        for number, width in enumerate(self._widths):
            if number in self._numbers:
                a, b = (getattr(self, f"lora_{which}{number}").float() for which in "AB")
                parts.append((b @ a * self._scale).unflatten(0, (self._repeats, width)))
            else:
                columns = getattr(self, f"lora_A{self._numbers[0]}").shape[1]
                parts.append(torch.zeros(self._repeats, width, columns))
        return torch.cat([part.to(parts[0].device) for part in parts], 1).flatten(0, 1)

    def _between(self, low: Tensor) -> Tensor:
        """What the other ranks have of the narrow product, as the layer itself has its input or output."""
        if self._expert or self._dim is None or self._group.size() == 1:
            return low
        mappings: Any = tensor_parallel
        if self._dim == 0:
            whole = (
                mappings.gather_from_sequence_parallel_region
                if self._sequence_parallel
                else mappings.copy_to_tensor_model_parallel_region
            )
        else:
            whole = (
                mappings.reduce_scatter_to_sequence_parallel_region
                if self._sequence_parallel
                else mappings.reduce_from_tensor_model_parallel_region
            )
        exchanged: Tensor = whole(low)
        return exchanged

    def _piece(self, number: int, part: Tensor | None, low: Tensor) -> Tensor:
        """[..., repeats, width] of one weight; zeros where it has no pair."""
        if part is None:
            return low.new_zeros(()).expand(*low.shape[:-1], self._repeats, self._widths[number])
        b = getattr(self, f"lora_B{number}")
        if self._expert and self._dim == 1:
            b = summed_gradient(b, self._group)
        return F.linear(part, b).unflatten(-1, (self._repeats, self._widths[number]))


def attach(adapter: Adapter, layer: torch.nn.Module) -> None:
    """Has a linear layer of megatron's, which returns (output, bias), give what the adapter adds as well."""

    def add(_: torch.nn.Module, arguments: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[Any, ...]:
        return (output[0] + adapter(arguments[0]), *output[1:])

    layer.register_forward_hook(add)


def differentiate(embedding: torch.nn.Module) -> None:
    """Has the output of a frozen embedding ask for its gradient.

    Recomputation gives no gradient to the weights inside of it where no input asks for one.
    """

    def ask(_: torch.nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() else output

    embedding.register_forward_hook(ask)


def without_gradient(embedding: torch.Tensor) -> None:
    """Has the first and the last stage add up a zero in the place of a frozen embedding's gradient.

    0.12 adds up that of an embedding that both hold without asking whether it has one.
    """
    frozen: Any = embedding
    frozen.main_grad = embedding.new_zeros(1)


def mark(
    parameter: torch.nn.Parameter,
    *,
    cut: bool,
    group: ProcessGroup,
    expert: bool,
    sequence_parallel: bool,
    reduced: bool,
) -> None:
    """Tells megatron what it asks of a parameter: who has which part, and who sums its gradient.

    `cut`: each rank of `group` has a part of its own. `reduced`: whether its gradient is summed over dp x cp
    rather than between the ranks that have the same experts. The norm of the gradient counts what is whole on
    all ranks of tp at their first one. That says nothing of an expert's, which are counted by `shared`.
    """
    marked: Any = parameter
    marked.allreduce = reduced
    marked.sequence_parallel = sequence_parallel and not expert and not cut
    marked.tensor_model_parallel = cut or expert
    if expert and not cut and group.rank() > 0:
        marked.shared = True


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        whole = gradient.contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None


def summed_gradient(parameter: Tensor, group: ProcessGroup) -> Tensor:
    """The parameter itself; its gradient is the sum of the gradients of all ranks of the group."""
    if group.size() == 1:
        return parameter
    summed: Tensor = _SummedGradient.apply(parameter, group)
    return summed
