"""Megatron's distributed checkpoints: sharded state in, a directory out."""

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing


def save(state: dict[str, Any], directory: Path) -> None:
    """Writes a state of sharded tensors and plain values into an existing, empty directory."""
    dist_checkpointing.save(state, str(directory))


def load(state: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The state of a directory, resharded to what `state` asks for, with the plain values."""
    loaded: dict[str, Any] = dist_checkpointing.load(state, str(directory))
    return loaded


def common_state(directory: Path) -> dict[str, Any]:
    """The plain values alone."""
    common: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(directory))
    return common
