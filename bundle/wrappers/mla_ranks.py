"""Multi-latent attention over tensor-parallel ranks of which each holds the whole sequence: its gradients."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def sum_rotary_key(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `MLASelfAttention.__init__` whose rotary keys get their gradient from the heads of all ranks.

    By a hook on the down projection, where each rank makes the whole of it. The compressed part behind the
    same projection has its sum already: that of the up projection's input.
    """

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        group = _ranks(self)
        if group is None:
            return

        def summed(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            torch.distributed.all_reduce(gradient, group=group)
            return gradient

        widths = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]

        def whole(_module: Any, _given: Any, output: Any) -> Any:
            combined, *rest = output
            if combined.shape[-1] != sum(widths):  # split over the ranks
                return output
            latent, rotary = combined.split(widths, dim=-1)
            if rotary.requires_grad:
                rotary.register_hook(summed)
            return (torch.cat([latent, rotary], dim=-1), *rest)

        self.linear_kv_down_proj.register_forward_hook(whole)

    return __init__


def share_out_query_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `MLASelfAttention.__init__` whose norm of compressed queries has one rank's part of a gradient.

    The sum over the ranks, which is to come, then is the whole. A norm that is part of a projection goes by
    another name and is not summed.
    """

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        group = _ranks(self)
        if group is None or not self.config.qk_layernorm or self.config.q_lora_rank is None:
            return
        for parameter in self.q_layernorm.parameters():
            parameter.register_hook(lambda gradient: gradient / group.size())

    return __init__


def _ranks(attention: Any) -> Any:
    """The group of ranks that share the heads and hold the whole sequence each; None where there is none."""
    collection = getattr(attention, "pg_collection", None) or attention.model_comm_pgs  # the latter to 0.14
    group = collection.tp
    return None if attention.config.sequence_parallel or group.size() == 1 else group
