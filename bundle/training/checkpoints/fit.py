"""Whether a checkpoint holds the model of a recipe: tensors of equal shapes can still be another model's."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from bundle.architectures import Architecture

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


def facts(architecture: Architecture) -> dict[str, Any]:
    """Returns what a checkpoint notes of its model, as JSON gives it back."""
    noted: dict[str, Any] = json.loads(json.dumps(asdict(architecture)))
    return noted


def changes(was: Mapping[str, Any], architecture: Architecture) -> list[str]:
    """Returns one line for each number that makes it another model; empty when there is none.

    What only one side notes is passed over: another version of mcore-bundle wrote the checkpoint.
    """
    return list(_changes(was, facts(architecture), ""))


def _changes(was: Mapping[str, Any], now: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name in (name for name in now if name in was and prefix + name not in _FREE):
        if isinstance(was[name], Mapping) and isinstance(now[name], Mapping):
            yield from _changes(was[name], now[name], f"{prefix}{name}.")
        elif was[name] != now[name]:
            yield f"{prefix}{name}: {was[name]} in the checkpoint, {now[name]} in the recipe"
