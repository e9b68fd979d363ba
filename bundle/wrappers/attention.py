"""Attention over tensor-parallel ranks: its sinks, and the gate of its output."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import layers


def count_every_sink(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `DotProductAttention.__init__` that marks learned sinks as one rank's share: one for a head."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        sinks = getattr(self, "softmax_offset", None)
        if isinstance(sinks, torch.nn.Parameter) and not getattr(sinks, "tensor_model_parallel", False):
            layers.set_tensor_model_parallel_attributes(sinks, is_parallel=True, dim=0, stride=1)

    return __init__


def gate_of_own_heads(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `SelfAttention.get_query_key_value_tensors` whose gate [s, b, n, d] has the query's heads.

    Ranks that share a group of heads get the whole group, of which the original cuts the query only.
    """

    @functools.wraps(original)
    def get_query_key_value_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        if len(found) != 4:
            return found
        query, key, value, gate = found
        own = query.shape[2]
        place = self.pg_collection.tp.rank() % (gate.shape[2] // own)
        return query, key, value, gate[:, :, place * own : (place + 1) * own]

    return get_query_key_value_tensors
