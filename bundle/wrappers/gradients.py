"""What gradients are divided by, where in their buffer they lie, and whose are in their norm."""

import functools
import math
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


def start_behind_padding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `_ParamAndGradBuffer.__init__` that lays a shared embedding out as 0.13 does (0.12).

    Its bucket starts behind padding, but it does so itself only where the data-parallel size does not divide
    the end of what is before it: else it reaches into the bucket before. So that size is meanwhile one that
    the padding is made of, a multiple of the true one; where everything was in place, nothing moves.
    """

    @functools.wraps(original)
    def __init__(self: Any, ddp_config: Any, *args: Any, **kwargs: Any) -> None:
        padding = 2**16 if ddp_config.pad_buckets_for_high_nccl_busbw else 128
        owner, name = type(self), "data_parallel_world_size"

        def unit(buffer: Any) -> int:
            return math.lcm(vars(buffer)[name], padding)

        def keep(buffer: Any, size: int) -> None:
            vars(buffer)[name] = size

        self.__class__ = type(owner.__name__, (owner,), {name: property(unit, keep)})
        try:
            original(self, ddp_config, *args, **kwargs)
        finally:
            self.__class__ = owner

    return __init__


def count_whole_weights_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns TELinear's `__init__` that marks no duplicated weight as one rank's share (to 0.16).

    Transformer Engine marks the weight of every linear layer.
    """

    @functools.wraps(original)
    def __init__(self: torch.nn.Module, *args: Any, parallel_mode: str | None, **kwargs: Any) -> None:
        original(self, *args, parallel_mode=parallel_mode, **kwargs)
        if parallel_mode == "duplicated":
            for parameter in self.parameters():
                parameter.tensor_model_parallel = False  # type: ignore[attr-defined]

    return __init__


def count_expert_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns TEGroupedLinear's `__init__` that marks every expert's weights as one rank's share (to 0.18).

    They are, whether experts are split or shared out. Transformer Engine marks them itself to 2.12. A bias
    behind a row-parallel product is whole on every rank.
    """

    @functools.wraps(original)
    def __init__(self: torch.nn.Module, *args: Any, parallel_mode: str | None, **kwargs: Any) -> None:
        original(self, *args, parallel_mode=parallel_mode, **kwargs)
        for name, parameter in self.named_parameters(recurse=False):
            if parallel_mode == "column" or (parallel_mode == "row" and name.startswith("weight")):
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]

    return __init__
