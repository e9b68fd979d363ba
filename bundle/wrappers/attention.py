"""Attention over tensor-parallel ranks: sinks, its output's gate and norm, and whose ranks they are."""

import dataclasses
import functools
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.spec_utils import ModuleSpec

from bundle.wrappers import Function, around, given
from bundle.wrappers.mla import summed


@around
def count_every_sink(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Returns `DotProductAttention.__init__` that marks learned sinks as one rank's share: one for a head."""
    original(self, *args, **kwargs)
    sinks = getattr(self, "softmax_offset", None)
    if isinstance(sinks, torch.nn.Parameter) and not getattr(sinks, "tensor_model_parallel", False):
        layers.set_tensor_model_parallel_attributes(sinks, is_parallel=True, dim=0, stride=1)


@around
def gate_of_own_heads(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns `SelfAttention.get_query_key_value_tensors` whose gate [s, b, n, d] has the query's heads.

    Ranks that share a group of heads get the whole group, of which the original cuts the query only.
    """
    found = original(self, *args, **kwargs)
    if len(found) != 4:
        return found
    query, key, value, gate = found
    own = query.shape[2]
    place = self.pg_collection.tp.rank() % (gate.shape[2] // own)
    return query, key, value, gate[:, :, place * own : (place + 1) * own]


@around
def over_given_ranks(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Returns `CrossAttention.__init__` whose projections are shared out over the ranks that it was given.

    The original has them take those of the layout. Nothing is changed where none are given.
    """
    call = given(original, self, *args, **kwargs)
    named = call.arguments
    collection = named.get("pg_collection") or named.get("model_comm_pgs")  # the latter to 0.14
    if collection is not None:
        parts = named["submodules"]
        ours = {name: _over(getattr(parts, name), collection.tp) for name in ("linear_q", "linear_kv")}
        named["submodules"] = dataclasses.replace(parts, **ours)
    original(*call.args, **call.kwargs)


def _over(layer: Any, group: Any) -> Any:
    """What builds the layer, with the group that it is told."""
    if isinstance(layer, type):
        layer = ModuleSpec(module=layer)
    if not isinstance(layer, ModuleSpec):  # a function, since 0.16
        return functools.partial(layer, tp_group=group)
    return dataclasses.replace(layer, params={**(layer.params or {}), "tp_group": group})


@around
def sum_output_norm(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Returns `GatedDeltaNet.__init__` whose output norm gets its gradient from the heads of all ranks.

    Under sequence parallelism megatron sums it at the end of a step.
    """
    original(self, *args, **kwargs)
    group = self.pg_collection.tp
    if not self.config.sequence_parallel and group.size() > 1:
        for parameter in self.out_norm.parameters():
            parameter.register_hook(functools.partial(summed, group=group))
