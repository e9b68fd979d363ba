"""Activation recomputation of multi-token prediction layers, and the memory that a recomputation keeps."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch


def keep_objects(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `MultiTokenPredictionLayer._checkpointed_forward` that takes packed sequences (0.16, 0.17).

    mcore hands every argument to `save_for_backward`, which takes tensors and None only.
    """

    @functools.wraps(original)
    def _checkpointed_forward(self: Any, forward_func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        objects = {k: v for k, v in kwargs.items() if v is not None and not torch.is_tensor(v)}
        tensors = {k: v for k, v in kwargs.items() if k not in objects}

        def forward(*values: Any, **named: Any) -> Any:  # mcore may pass the tensors on without their names
            rest = dict(zip(tensors, values[len(args) :], strict=False))
            return forward_func(*values[: len(args)], **rest, **named, **objects)

        return original(self, forward, *args, **tensors)

    return _checkpointed_forward


def bind_padding_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `MultiTokenPredictionLayer._checkpointed_forward` that takes a padding mask (0.18).

    Its caller passes one, always; its own callee takes one; only its signature forgot it.
    """

    @functools.wraps(original)
    def _checkpointed_forward(self: Any, *args: Any, padding_mask: Any = None, **kwargs: Any) -> Any:
        bound = copy.copy(self)  # the same parameters; only its forward function differs
        bound._proj_and_transformer_layer = functools.partial(
            self._proj_and_transformer_layer, padding_mask=padding_mask
        )
        return original(bound, *args, **kwargs)

    return _checkpointed_forward


def release_graph(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `MoELayer.forward` whose token dispatcher keeps no part of the autograd graph.

    It keeps the router's probabilities until its next forward pass, and with them the leaves of the graph
    of a recomputation: the input of the layer and the gradient of that input, for every MoE layer.
    """

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        dispatcher = self.token_dispatcher
        for holder in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
            kept = vars(holder) if holder is not None else {}
            kept.update({k: v.detach() for k, v in kept.items() if _is_in_graph(v)})
        return output

    return forward


def _is_in_graph(value: Any) -> bool:
    return torch.is_tensor(value) and value.grad_fn is not None
