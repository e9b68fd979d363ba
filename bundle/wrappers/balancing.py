"""The weight of megatron's own losses that balance experts, and what its steering bias counts with."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler


def per_token_over_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the schedules' forward step whose losses per token count for all ranks of a micro-batch.

    Routers weigh them by the tokens that one rank sees, and all gradients are divided by those of all ranks.
    """
    return _weighing(original, lambda config: config.calculate_per_token_loss, _tensor_and_context)


def mean_over_context(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the schedules' forward step whose mean losses count for all context-parallel ranks (to 0.15).

    Gradients are averaged over those ranks, of which each has its part of the loss.
    """
    return _weighing(
        original,
        lambda config: not config.calculate_per_token_loss,
        parallel_state.get_context_parallel_world_size,
    )


def _tensor_and_context() -> int:
    return int(parallel_state.get_tensor_and_context_parallel_group().size())


def _weighing(
    original: Callable[..., Any], concerns: Callable[[Any], bool], factor: Callable[[], int]
) -> Callable[..., Any]:
    """The original, after which the scale that it has set is larger; from 0.14 the inner of two functions."""
    inner = original.__globals__.get("forward_step_calc_loss")
    if inner is not None and original.__name__ != inner.__name__:
        return original
    place = list(inspect.signature(original).parameters).index("config")

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        config = kwargs["config"] if "config" in kwargs else args[place]
        if getattr(config, "num_moe_experts", None) is not None and concerns(config):
            MoEAuxLossAutoScaler.main_loss_backward_scale.mul_(factor())
        return result

    return step


def every_sequence(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `TopKRouter._apply_seq_aux_loss` whose loss per token counts for all rows (0.16 to 0.18).

    What it hands over to be weighed by is the tokens of a single row.
    """

    @functools.wraps(original)
    def apply(
        self: Any,
        probs: Any,
        scores: Any,
        routing_map: Any,
        seq_length: int,
        bsz: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        attach = self.attach_and_log_load_balancing_loss

        @functools.wraps(attach)
        def of_all_rows(*given: Any, valid_token_count: Any, **more: Any) -> Any:
            return attach(*given, valid_token_count=valid_token_count * bsz, **more)

        self.attach_and_log_load_balancing_loss = of_all_rows
        try:
            return original(self, probs, scores, routing_map, seq_length, bsz, *args, **kwargs)
        finally:
            del self.attach_and_log_load_balancing_loss

    return apply


def exact_counts(original: Callable[..., None]) -> Callable[..., None]:
    """Returns `TopKRouter._maintain_float32_expert_bias` that keeps the counts in float32 as well.

    The wrapper for mixed precision makes them bf16, which has no 257. Called before each forward pass.
    """

    @functools.wraps(original)
    def maintain(self: Any) -> None:
        original(self)
        counts = getattr(self, "local_tokens_per_expert", None)
        if counts is not None and counts.dtype != torch.float32:
            counts.data = counts.data.to(torch.float32)

    return maintain
