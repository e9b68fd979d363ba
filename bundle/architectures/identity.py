"""What makes a model another one beside its weights: equal shapes can still be another model's."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from bundle.architectures.architecture import Architecture

# They decide how a model is begun and trained, not what its weights mean.
_FREE = {
    "model_type",
    "initializer_range",
    "attention_dropout",
    "max_position_embeddings",
    "moe.aux_loss_coeff",
    "moe.aux_loss_per_sequence",
    "moe.unused_aux_loss_coeff",
}


def noted(architecture: Architecture) -> dict[str, Any]:
    """Every number of it, as JSON gives it back."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(architecture)))
    return found


def changes(was: Mapping[str, Any], architecture: Architecture, place: str) -> list[str]:
    """One line for each number that makes the recipe's model another one than what is noted in a place.

    What only one side notes is passed over: another version of mcore-bundle wrote it.
    """
    return list(_changes(was, noted(architecture), place, ""))


def _changes(was: Mapping[str, Any], now: Mapping[str, Any], place: str, prefix: str) -> Iterator[str]:
    for name in (name for name in now if name in was and prefix + name not in _FREE):
        if isinstance(was[name], Mapping) and isinstance(now[name], Mapping):
            yield from _changes(was[name], now[name], place, f"{prefix}{name}.")
        elif was[name] != now[name]:
            yield f"{prefix}{name}: {was[name]} in {place}, {now[name]} in the recipe"
