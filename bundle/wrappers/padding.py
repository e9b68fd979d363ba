"""Routers that are told which rows are padding: what they count, and what a count is divided by."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from bundle.mcore.context import Slot

_over_the_window = Slot(False)


def one_mask_for_all_experts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `TopKRouter._apply_expert_bias` that takes the mask [t] for every expert of the map [t, e]."""

    @functools.wraps(original)
    def _apply_expert_bias(
        self: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> Any:
        if padding_mask is not None and padding_mask.ndim == 1:
            padding_mask = padding_mask.unsqueeze(-1)
        return original(self, routing_map, padding_mask=padding_mask)

    return _apply_expert_bias


def sum_of_a_copy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `reduce_from_tensor_model_parallel_region`, as the routers see it, that leaves its input alone.

    The sum over the ranks is taken in place, and the caller goes on to read what it has summed as its own.
    """

    @functools.wraps(original)
    def reduce_from_tensor_model_parallel_region(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(tensor.clone(), *args, **kwargs)

    return reduce_from_tensor_model_parallel_region


def over_the_window(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `TopKRouter._apply_global_aux_loss` in which `counts_like_these_tokens` is at work."""

    @functools.wraps(original)
    def _apply_global_aux_loss(*args: Any, **kwargs: Any) -> Any:
        with _over_the_window.set(True):
            return original(*args, **kwargs)

    return _apply_global_aux_loss


def counts_like_these_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `switch_load_balancing_loss_func`, as the routers see it, for counts of other tokens.

    The counts of the global loss are an average over the micro-batches so far, but are divided by this
    one's tokens: they are brought to as many choices, [tokens x topk], as the division expects.
    """

    @functools.wraps(original)
    def switch_load_balancing_loss_func(
        probs: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        total_num_tokens: Any,
        topk: int,
        *args: Any,
        **kw: Any,
    ) -> Any:
        if _over_the_window.get():
            share = tokens_per_expert / tokens_per_expert.sum().clamp(min=1)
            tokens_per_expert = share * (total_num_tokens * topk)
        return original(probs, tokens_per_expert, total_num_tokens, topk, *args, **kw)

    return switch_load_balancing_loss_func
