"""Compare two models beyond their weights: equal shapes can still belong to different models."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from bundle.architectures.architecture import Architecture

# They decide how a model is begun and trained, not what its weights mean.
_TRAINING_FIELDS = {
    "model_type",
    "initializer_range",
    "attention_dropout",
    "max_position_embeddings",
    "moe.aux_loss_coeff",
    "moe.aux_loss_per_sequence",
    "moe.unused_aux_loss_coeff",
}


def dump_architecture(architecture: Architecture) -> dict[str, Any]:
    """Return every number of an architecture as JSON gives it back."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(architecture)))
    return values


def list_changes(recorded: Mapping[str, Any], architecture: Architecture, source: str) -> list[str]:
    """Return a line for each number that differs between a recorded model and the recipe's, and matters.

    A number that only one side has is ignored: another version of mcore-bundle wrote it.
    """
    return list(_iterate_changes(recorded, dump_architecture(architecture), source, ""))


def _iterate_changes(
    recorded: Mapping[str, Any], current: Mapping[str, Any], source: str, prefix: str
) -> Iterator[str]:
    for name in (name for name in current if name in recorded and prefix + name not in _TRAINING_FIELDS):
        if isinstance(recorded[name], Mapping) and isinstance(current[name], Mapping):
            yield from _iterate_changes(recorded[name], current[name], source, f"{prefix}{name}.")
        elif recorded[name] != current[name]:
            yield f"{prefix}{name}: {recorded[name]} in {source}, but {current[name]} in the recipe"
