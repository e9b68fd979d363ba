"""Deepstack: what a vision tower gives for the decoder's first layers, added behind each of them."""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bundle.mcore import context


class Deepstack:
    """What is added behind the first layers of a model chunk, in the forward pass and when it is recomputed.

    Layers inside a checkpoint are differentiated there, from the checkpoint's inputs on, of which these are
    none. So they add leaves, whose gradients go back to the tower at the decoder's input, behind which the
    backward pass has seen all layers: one backward pass of the tower, recomputation or not.
    """

    def __init__(self) -> None:
        self._added: Sequence[Tensor] = ()
        self._backward = False
        self._again: dict[int, deque[Tensor]] = defaultdict(deque)
        self._run: object | None = None

    def attach(self, layers: Sequence[torch.nn.Module]) -> None:
        """Adds behind each of these from now on; `begin` says what."""
        for number, layer in enumerate(layers):
            layer.register_forward_hook(self._behind(number))

    def begin(self, decoder_input: Tensor, added: Sequence[Tensor]) -> Tensor:
        """The decoder's input of the next forward pass, which adds one of `added` behind each layer."""
        if (run := context.run.get()) is not self._run:  # whatever an interrupted one has left goes with it
            self._run = run
            self._again.clear()
        self._backward = torch.is_grad_enabled()
        if not self._backward:
            self._added = added
            return decoder_input
        self._added = leaves = [each.detach().requires_grad_(each.requires_grad) for each in added]
        carried: Tensor = _Carried.apply(decoder_input, leaves, *added)
        return carried

    def _behind(self, number: int) -> Any:
        def add(_: torch.nn.Module, __: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Any, ...]:
            hidden, *rest = output
            return hidden + self._next(number), *rest

        return add

    def _next(self, number: int) -> Tensor:
        if (
            context.in_backward()
        ):  # the pipeline recomputes micro-batches in the order of their forward passes
            return self._again[number].popleft()
        added = self._added[number]
        if self._backward and not torch.is_grad_enabled():  # the first pass of a checkpoint
            self._again[number].append(added)
        return added


class _Carried(torch.autograd.Function):
    """The decoder's input as it is; on the way back what the leaves have got goes to what they stand for."""

    @staticmethod
    def forward(ctx: Any, decoder_input: Tensor, leaves: Sequence[Tensor], *_: Tensor) -> Tensor:
        ctx.leaves = leaves
        return decoder_input.view_as(decoder_input)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return gradients[0], None, *(leaf.grad for leaf in ctx.leaves)
