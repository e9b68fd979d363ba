"""Distributed checkpoints: the optimizer's state, newer torch and numpy, files that could run code."""

import functools
import inspect
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from bundle.mcore import unpickling
from bundle.replacements import Function, make_wrapper

MAX_GATHER_ELEMENTS = 2**26  # of all ranks together, on the device at one time: 256 MiB


@make_wrapper
def pass_serialization_format(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Return `FileSystemWriterAsync.write_preloaded_data` that works with torch 2.8 and later (0.12).

    In torch 2.8 `_write_item` has one more argument, which 0.12 does not pass.
    """
    module: Any = sys.modules[original.__module__]
    write_item = module._write_item
    if "serialization_format" not in inspect.signature(write_item).parameters:
        return original(*args, **kwargs)
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    module._write_item = functools.partial(write_item, serialization_format=SerializationFormat.TORCH_SAVE)
    try:  # mcore calls this in a child process of its own, so that no thread sees the name change
        return original(*args, **kwargs)
    finally:
        module._write_item = write_item


def restore_numpy_product(original: types.ModuleType) -> types.ModuleType:
    """Return numpy with `product`, as before 2.0, for one module of megatron only (to 0.15)."""
    older = types.ModuleType(original.__name__, original.__doc__)
    vars(older).update(vars(original), product=original.prod)
    return older


@make_wrapper
def unpickle_data_only(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Return a loader of common state that unpickles data only, as 0.14 does.

    A checkpoint may come from a stranger, and unpickling it without limits runs any code in it.
    """
    with unpickling.force_weights_only_load():
        return original(*args, **kwargs)


@make_wrapper
def default_to_reshardable(
    original: Function,
    self: Any,
    model_sharded_state_dict: Any = None,
    is_loading: bool = False,
    sharding_type: str | None = None,
    metadata: Any = None,
) -> Any:
    """Return `DistributedOptimizer.sharded_state_dict` whose default form can be saved (0.16 and later)."""
    options = dict(metadata or {})
    if sharding_type is None and not getattr(self.ddp_config, "use_megatron_fsdp", False):
        options.setdefault("distrib_optim_sharding_type", "fully_reshardable")
    return original(self, model_sharded_state_dict or {}, is_loading, sharding_type, options)


@make_wrapper
def keep_loaded_steps(original: Function, self: Any, state_dict: Any) -> Any:
    """Return `DistributedOptimizer.load_parameter_state_from_dp_reshardable` that leaves Adam's steps alone.

    The steps come with the parameter groups and are loaded already. The shards hold the steps of the time
    when the tensors to load into were made.
    """
    states = self.optimizer.state
    steps = {p: s["step"].clone() for p, s in states.items() if torch.is_tensor(s.get("step"))}
    loaded = original(self, state_dict)
    for parameter, step in steps.items():
        states[parameter]["step"] = step
    return loaded


@make_wrapper
def gather_state_in_pieces(
    original: Function,
    self: Any,
    use_gloo_comm: bool = True,
    empty_data: bool = False,
    return_on_all_ranks: bool = False,
) -> Any:
    """Return `DistributedOptimizer.get_parameter_state_dp_zero` that needs little device memory (from 0.15).

    Buffers stay on the host, as they do for gloo. The device's group gathers them piece by piece.
    """
    if use_gloo_comm or empty_data or not return_on_all_ranks:
        return original(self, use_gloo_comm, empty_data, return_on_all_ranks)
    module: Any = dist
    all_gather, gloo_group = module.all_gather, self.data_parallel_group_gloo
    module.all_gather, self.data_parallel_group_gloo = _gather_in_pieces, self.data_parallel_group
    try:
        return original(self, use_gloo_comm=True, return_on_all_ranks=True)
    finally:
        module.all_gather, self.data_parallel_group_gloo = all_gather, gloo_group


def _gather_in_pieces(gathered: Sequence[torch.Tensor], share: torch.Tensor, group: Any) -> None:
    """Fill `gathered`, host tensors like `share`, with the shares of all ranks of a group of the device."""
    if len(gathered) == 1:
        gathered[0].copy_(share)
        return
    size = max(1, MAX_GATHER_ELEMENTS // len(gathered))
    for start in range(0, len(share), size):
        piece = share[start : start + size].cuda()
        pieces = piece.new_empty(len(gathered) * len(piece))
        dist.all_gather_into_tensor(pieces, piece, group=group)
        for tensor, part in zip(gathered, pieces.chunk(len(gathered)), strict=True):
            tensor[start : start + size].copy_(part)
