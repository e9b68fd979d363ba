"""A directory of PEFT (github.com/huggingface/peft): what its adapter_config.json says, read and written.

PEFT writes every setting that it has into every file. So a key that is not known here is passed over where it
is empty or false, and else refused by its name.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bundle import files
from bundle.errors import UsageError, shown

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every published name in WEIGHTS
_LARGEST_FILE = 2**22
_READ = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
# They say how an adapter is begun, trained or loaded, not what it computes.
_OTHERS = {
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "task_type",
}
# Ways to begin that leave the weights beside the adapter as they were published.
_BEGINNINGS = (None, True, False, "gaussian", "orthogonal", "eva")


def read(directory: Path) -> dict[str, Any]:
    """Rank, alpha and targets of a directory. Raises UsageError with everything that is not computed here."""
    path = directory / CONFIG
    try:
        said = json.loads(files.content(path, _LARGEST_FILE))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; model.lora.path must be a directory of PEFT") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    if not isinstance(said, dict):
        raise UsageError(f"{path}: must hold a JSON object")
    refused = []
    if said.get("peft_type") != "LORA":
        refused.append(f"peft_type {shown(said.get('peft_type'))}: only LORA is computed")
    if said.get("init_lora_weights") not in _BEGINNINGS:
        way = shown(said["init_lora_weights"])
        refused.append(f"init_lora_weights {way}: it changes the weights beside the adapter")
    if said.get("bias", "none") != "none":
        refused.append(f"bias {shown(said['bias'])}: biases are not trained here")
    refused += [f"{key}: missing" for key in _READ if said.get(key) is None]
    if isinstance(said.get("target_modules"), str):
        refused.append("target_modules: a pattern; name the modules in model.lora.targets")
    known = {*_READ, *_OTHERS, "peft_type", "init_lora_weights", "bias"}
    refused += [
        f"{key} {shown(value)}: is not computed here"
        for key, value in said.items()
        if key not in known and not _nothing(value)
    ]
    if refused:
        raise UsageError(f"{path}: not an adapter that can be trained on", refused)
    found = {ours: said[theirs] for theirs, ours in _READ.items()}
    return found | {"targets": sorted(found["targets"]), "alpha": float(found["alpha"])}


def config(rank: int, alpha: float, targets: Sequence[str], base: str | None) -> Mapping[str, Any]:
    """What an adapter_config.json says of such adapters of the model in the directory `base`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _nothing(value: Any) -> bool:
    """Empty and false values, and mappings of such: {"": 0} says no more than {}."""
    return all(_nothing(each) for each in value.values()) if isinstance(value, dict) else not value
