"""Our own part of a checkpoint: where the run was, and of which model, weights and optimizer."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bundle import files
from bundle.architectures import identity
from bundle.architectures.adapters import SUPPORTED_VARIANT_FLAGS
from bundle.errors import UsageError
from bundle.recipe import Recipe
from bundle.recipe.sections import Optimizer

FILE_NAME = "state.json"
_SCHEMA = 4


@dataclass(frozen=True)
class TrainState:
    """Where a run is after `step` steps: everything that JSON keeps exactly."""

    step: int
    consumed_samples: int
    data_digest: str
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """What metrics carry from step to step, such as sums since the last log line."""


@dataclass(frozen=True)
class SavedState:
    """The state with what loading it needs to know."""

    state: TrainState
    scheduler: Mapping[str, Any]
    layout: Mapping[str, int]
    """The sizes of all groups: random states fit only the layout that they come from."""
    sharding: str
    """How megatron laid out the optimizer's state."""
    optimizer: str
    """Whose state it holds, as `describe_optimizer_state_format` says it."""
    mcore: str
    model: Mapping[str, Any]
    """What the weights are of, as `architectures.identity.dump_architecture` says it."""
    adapters: Mapping[str, Any] | None = None
    """What it holds in the place of the weights, as `describe_adapters` says it."""
    base_digests: Mapping[str, str] | None = None
    """SHA-256 of the files of the weights that its adapters are of; none of those of random ones."""

    def write(self, directory: Path) -> None:
        """Write this state into a checkpoint."""
        files.write_json(directory / FILE_NAME, {"schema": _SCHEMA, **asdict(self)})


def read(directory: Path) -> SavedState:
    """Return the saved state of a checkpoint; raise ValueError with the reason why it cannot be used."""
    try:
        document = json.loads((directory / FILE_NAME).read_text(encoding="utf-8"))
        if document.pop("schema") != _SCHEMA:
            raise ValueError("written by another version of mcore-bundle")
        return SavedState(**{**document, "state": TrainState(**document["state"])})
    except FileNotFoundError:
        raise ValueError(f"it has no {FILE_NAME}") from None
    except (OSError, TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"its {FILE_NAME} is not valid: {error}") from None


def describe_optimizer_state_format(optimizer: Optimizer) -> str:
    """Return which optimizer's state a checkpoint has, and whether data-parallel ranks divided it."""
    return f"{optimizer.name}, {'divided' if optimizer.use_distributed_optimizer else 'not divided'}"


def describe_adapters(recipe: Recipe, *, loaded: bool) -> dict[str, Any] | None:
    """Return a checkpoint's description of its adapters, as JSON has it; None where it holds the weights.

    `loaded` says whether the model begins with the weights of model.path.
    """
    lora = recipe.model.lora
    if lora is None:
        return None
    base_weights = "the weights of model.path" if loaded else f"random weights of seed {recipe.seed}"
    described: dict[str, Any] = {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.targets)}
    flags = {
        flag: True for flag in SUPPORTED_VARIANT_FLAGS if getattr(lora, flag)
    }  # older checkpoints name none
    return described | flags | {"beside": base_weights}


def _format_trained_weights(adapters: Mapping[str, Any] | None) -> str:
    if not adapters:
        return "all weights"
    parts = (f"{'base weights' if key == 'beside' else key}: {adapters[key]}" for key in sorted(adapters))
    return f"adapters ({'; '.join(parts)})"


def refuse_another_model(directory: Path, saved: SavedState, recipe: Recipe, *, loaded: bool) -> None:
    """Raise UsageError for a checkpoint of another model, or of other adapters.

    `loaded` says whether the model begins with the weights of model.path.
    """
    if changes := identity.list_changes(saved.model, recipe.architecture, "the checkpoint"):
        raise UsageError(f"{directory}: the checkpoint's model differs from the recipe's", changes)
    own_adapters = describe_adapters(recipe, loaded=loaded)
    if saved.adapters != own_adapters:
        saved_weights, recipe_weights = (
            _format_trained_weights(adapters) for adapters in (saved.adapters, own_adapters)
        )
        raise UsageError(
            f"{directory}: has {saved_weights}, but the recipe (model.lora) trains {recipe_weights}."
            " Export the checkpoint with its own recipe (checkpoint.export: hf), and set model.path to the"
            " export."
        )


def refuse_other_weights(directory: Path, saved: SavedState, base_digests: Mapping[str, str] | None) -> None:
    """Raise UsageError where adapters were trained beside other weights than the present ones."""
    if saved.base_digests is None or base_digests is None or saved.base_digests == base_digests:
        return  # all weights, or written before this was noted
    was, now = dict(saved.base_digests), dict(base_digests)
    changed = [name for name in sorted({*was, *now}) if was.get(name) != now.get(name)]
    raise UsageError(
        f"{directory}: its adapters were trained with other weights than model.path has. Put those back, or"
        " start another run with the adapters alone (checkpoint.export: peft there, model.lora.path here).",
        [
            f"{name} {'is missing' if name not in now else 'is new' if name not in was else 'has changed'}"
            for name in changed
        ],
    )


def refuse_another_optimizer(directory: Path, saved: SavedState, optimizer: Optimizer) -> None:
    """Raise UsageError for the state of another optimizer than the recipe's."""
    if (own_optimizer := describe_optimizer_state_format(optimizer)) != saved.optimizer:
        raise UsageError(
            f"{directory}: optimizer.name or optimizer.use_distributed_optimizer differs. The checkpoint has"
            f" {saved.optimizer} between data-parallel ranks, but the recipe has {own_optimizer}. Load only"
            " the weights with --weights-only."
        )


def list_data_changes(saved: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """Return what differs between the data of a checkpoint and the data of this run."""
    keys = dict.fromkeys([*saved, *current])
    return [
        f"data {key}: was {saved.get(key)!r} in the checkpoint, but is {current.get(key)!r} in this run"
        for key in keys
        if saved.get(key) != current.get(key)
    ]
