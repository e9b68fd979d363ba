"""Our own part of a checkpoint: where the run was, of which model, and each rank's random states (RNG)."""

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from bundle import files
from bundle.mcore import groups
from bundle.recipe.sections import Optimizer

NAME = "state.json"
_SCHEMA = 3
_MEGATRON = "megatron."


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
    optimizer: str
    """Whose state it holds, as `optimizer_kept` says it."""
    mcore: str
    model: Mapping[str, Any]
    """What the weights are of, as `architectures.identity.noted` says it."""
    adapters: Mapping[str, Any] | None = None
    """What it holds in the place of the weights, as `models.adapters.noted` says it."""

    def write(self, directory: Path) -> None:
        """Writes it into a checkpoint."""
        files.write_json(directory / NAME, {"schema": _SCHEMA, **asdict(self)})


def read(directory: Path) -> Saved:
    """What a checkpoint says about itself; raises ValueError saying why it cannot be used."""
    try:
        found = json.loads((directory / NAME).read_text(encoding="utf-8"))
        if found.pop("schema") != _SCHEMA:
            raise ValueError("written by another version of mcore-bundle")
        return Saved(**{**found, "state": TrainState(**found["state"])})
    except FileNotFoundError:
        raise ValueError(f"it has no {NAME}") from None
    except (OSError, TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"its {NAME} cannot be used: {error}") from None


def optimizer_kept(optimizer: Optimizer) -> str:
    """Which optimizer a checkpoint has the state of, and whether data-parallel ranks divided it."""
    return f"{optimizer.name}, {'divided' if optimizer.use_distributed_optimizer else 'not divided'}"


def write_rng(directory: Path, rank: int, device: torch.device) -> None:
    """Writes the random states of this rank as safetensors: Python's, numpy's, torch's and megatron's.

    Raises JobFailed when they cannot be written.
    """
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "python": torch.tensor(words, dtype=torch.int64),
    }
    if device.type != "cpu":
        tensors["device"] = torch.get_device_module(device).get_rng_state()
    tensors |= {_MEGATRON + name: state for name, state in groups.random_states().items()}
    rest = {"python": [version, gauss], "numpy": [kind, position, has_gauss, cached]}
    path = _rng_path(directory, rank)
    try:
        save_file({n: t.contiguous() for n, t in tensors.items()}, path, {"rest": json.dumps(rest)})
    except (OSError, SafetensorError) as error:  # it wraps the system's errors in one of its own
        raise files.failed(path, error) from error


def read_rng(directory: Path, rank: int, device: torch.device) -> None:
    """Puts back what `write_rng` wrote."""
    with safe_open(_rng_path(directory, rank), framework="pt") as file:
        rest = json.loads(file.metadata()["rest"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
    version, gauss = rest["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    kind, position, has_gauss, cached = rest["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    if "device" in tensors:
        torch.get_device_module(device).set_rng_state(tensors["device"])
    groups.set_random_states(
        {n.removeprefix(_MEGATRON): t for n, t in tensors.items() if n.startswith(_MEGATRON)}
    )


def _rng_path(directory: Path, rank: int) -> Path:
    return directory / f"random-{rank:05d}.safetensors"
