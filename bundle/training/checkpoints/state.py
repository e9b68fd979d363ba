"""Our own part of a checkpoint, as JSON: where the run was, and what it needs to go on exactly there."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bundle.training import atomic

NAME = "state.json"
_SCHEMA = 2


@dataclass(frozen=True)
class TrainState:
    """Where a run is after `step` steps: everything that JSON keeps exactly."""

    step: int
    consumed_samples: int
    data_digest: str
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """What metrics carry from step to step, such as sums since the last log line."""


@dataclass(frozen=True)
class Saved:
    """The state with what loading it needs to know."""

    state: TrainState
    scheduler: Mapping[str, Any]
    layout: Mapping[str, int]
    """The sizes of all groups: random states fit only the layout that they come from."""
    sharding: str
    """How megatron laid out the optimizer's state."""
    mcore: str
    model: Mapping[str, Any]
    """What the weights are of, as `fit.facts` says it."""

    def write(self, directory: Path) -> None:
        """Writes it into a checkpoint."""
        atomic.write_json(directory / NAME, {"schema": _SCHEMA, **asdict(self)})


def read(directory: Path) -> Saved:
    """Returns what a checkpoint says about itself; raises ValueError saying why it cannot be used."""
    try:
        found = json.loads((directory / NAME).read_text(encoding="utf-8"))
        if found.pop("schema") != _SCHEMA:
            raise ValueError("written by another version of mcore-bundle")
        return Saved(**{**found, "state": TrainState(**found["state"])})
    except FileNotFoundError:
        raise ValueError(f"it has no {NAME}") from None
    except (OSError, TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"its {NAME} cannot be used: {error}") from None
