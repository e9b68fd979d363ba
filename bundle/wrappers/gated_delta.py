"""The gated delta net over tensor-parallel ranks."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def sum_output_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `GatedDeltaNet.__init__` whose output norm gets its gradient from the heads of all ranks.

    Under sequence parallelism megatron sums it at the end of a step.
    """

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        group = self.pg_collection.tp
        if self.config.sequence_parallel or group.size() == 1:
            return

        def summed(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            torch.distributed.all_reduce(gradient, group=group)
            return gradient

        for parameter in self.out_norm.parameters():
            parameter.register_hook(summed)

    return __init__
