"""Deepstack: a vision tower's features that are added behind the decoder's first layers."""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bundle.mcore import context


class Deepstack:
    """The features that are added behind the first layers of a model chunk, also in recomputation.

    Layers inside a checkpoint are differentiated from the checkpoint's inputs on, and the features are not
    among these. Therefore the layers add leaves. The leaves' gradients go back to the tower at the decoder's
    input, where the backward pass has seen all layers. The tower has one backward pass, with recomputation or
    without.
    """

    def __init__(self) -> None:
        self._features: Sequence[Tensor] = ()
        self._has_backward = False
        self._recompute_queues: dict[int, deque[Tensor]] = defaultdict(deque)
        self._run: object | None = None

    def attach(self, layers: Sequence[torch.nn.Module]) -> None:
        """Add behind each of these layers from now on what `begin_forward` gets."""
        for number, layer in enumerate(layers):
            layer.register_forward_hook(self._make_hook(number))

    def begin_forward(self, decoder_input: Tensor, features: Sequence[Tensor]) -> Tensor:
        """Return the decoder's input of the next forward pass.

        The pass adds one of `features` behind each layer.
        """
        if (
            run := context.schedule_run.get()
        ) is not self._run:  # whatever an interrupted one has left goes with it
            self._run = run
            self._recompute_queues.clear()
        self._has_backward = torch.is_grad_enabled()
        if not self._has_backward:
            self._features = features
            return decoder_input
        self._features = leaves = [
            feature.detach().requires_grad_(feature.requires_grad) for feature in features
        ]
        carried: Tensor = _LeafGradientCarrier.apply(decoder_input, leaves, *features)
        return carried

    def _make_hook(self, number: int) -> Any:
        def add(_: torch.nn.Module, __: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Any, ...]:
            hidden, *rest = output
            return hidden + self._get_layer_feature(number), *rest

        return add

    def _get_layer_feature(self, number: int) -> Tensor:
        if (
            context.is_in_backward()
        ):  # the pipeline recomputes micro-batches in the order of their forward passes
            return self._recompute_queues[number].popleft()
        feature = self._features[number]
        if self._has_backward and not torch.is_grad_enabled():  # the first pass of a checkpoint
            self._recompute_queues[number].append(feature)
        return feature


class _LeafGradientCarrier(torch.autograd.Function):
    """The decoder's input unchanged; in backward the gradients of the leaves go to their features."""

    @staticmethod
    def forward(ctx: Any, decoder_input: Tensor, leaves: Sequence[Tensor], *_: Tensor) -> Tensor:
        ctx.leaves = leaves
        return decoder_input.view_as(decoder_input)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return gradients[0], None, *(leaf.grad for leaf in ctx.leaves)
