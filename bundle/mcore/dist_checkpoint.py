"""Megatron's distributed checkpoints: sharded state in, a directory out."""

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper


def save(state: dict[str, Any], directory: Path) -> None:
    """Writes a state of sharded tensors and plain values into an existing, empty directory."""
    dist_checkpointing.save(state, str(directory))


def save_shared(state: dict[str, Any], directory: Path) -> None:
    """Writes as `save` does, every rank its share of what all ranks hold, as Megatron-LM does by default."""
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy())
    dist_checkpointing.save(state, str(directory), strategy)


def flat(key: str, whole: torch.Tensor, rank: int) -> Any:
    """A tensor that all ranks hold, as one flat range of itself: optimizer state has this form to 0.15."""
    part = slice(0, whole.numel())
    return dist_checkpointing.ShardedTensor.from_rank_offsets_flat(
        key, whole.flatten(), tuple(whole.shape), flattened_range=part, replica_id=rank
    )


def of_optimizer(model: torch.nn.Module, optimizer: Any, form: str | None, *, loading: bool = False) -> Any:
    """The optimizer's sharded state in one of megatron's forms; None: in the one that is its default."""
    asked = {} if form is None else {"metadata": {"distrib_optim_sharding_type": form}}
    return optimizer.sharded_state_dict(model.sharded_state_dict(), is_loading=loading, **asked)


def load(state: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The state of a directory, resharded to what `state` asks for, with the plain values."""
    loaded: dict[str, Any] = dist_checkpointing.load(state, str(directory))
    return loaded


def common_state(directory: Path) -> dict[str, Any]:
    """The plain values alone."""
    common: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(directory))
    return common
