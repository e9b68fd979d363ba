"""What the gradients are divided by."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state


def count_tokens_of_all_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `finalize_model_grads` that counts the tokens of all context-parallel ranks (0.12).

    mcore sums the gradients over data and context parallel ranks and the tokens over data parallel ones.
    """

    @functools.wraps(original)
    def finalize_model_grads(model: Any, num_tokens: torch.Tensor | None = None) -> Any:
        if num_tokens is not None:
            torch.distributed.all_reduce(num_tokens, group=parallel_state.get_context_parallel_group())
        return original(model, num_tokens)

    return finalize_model_grads
