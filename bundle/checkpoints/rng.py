"""Each rank's random states (RNG) in a checkpoint: Python's, numpy's, torch's and megatron's."""

import json
import random
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from bundle import files
from bundle.mcore import groups

_MEGATRON_PREFIX = "megatron."


def write(directory: Path, rank: int, device: torch.device) -> None:
    """Write the random states of this rank as safetensors.

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
    tensors |= {_MEGATRON_PREFIX + name: state for name, state in groups.get_rng_tracker_states().items()}
    rest = {"python": [version, gauss], "numpy": [kind, position, has_gauss, cached]}
    path = _get_path(directory, rank)
    try:
        save_file({n: t.contiguous() for n, t in tensors.items()}, path, {"rest": json.dumps(rest)})
    except (OSError, SafetensorError) as error:  # it wraps the system's errors in one of its own
        raise files.build_write_error(path, error) from error


def restore(directory: Path, rank: int, device: torch.device) -> None:
    """Restore the random states that `write` wrote."""
    with safe_open(_get_path(directory, rank), framework="pt") as file:
        rest = json.loads(file.metadata()["rest"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
    version, gauss = rest["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    kind, position, has_gauss, cached = rest["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    if "device" in tensors:
        torch.get_device_module(device).set_rng_state(tensors["device"])
    groups.set_rng_tracker_states(
        {n.removeprefix(_MEGATRON_PREFIX): t for n, t in tensors.items() if n.startswith(_MEGATRON_PREFIX)}
    )


def _get_path(directory: Path, rank: int) -> Path:
    return directory / f"random-{rank:05d}.safetensors"
