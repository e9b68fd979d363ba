"""Models as data: a Hugging Face config read into dimensions, layers, experts and MTP."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bundle import files
from bundle.architectures.architecture import (
    MLA,
    Architecture,
    DeltaNet,
    MoE,
    RopeScaling,
    Vision,
    contradictions,
    padded_vocabulary,
)
from bundle.architectures.config import Keys
from bundle.architectures.families import FAMILIES as OF_TEXT
from bundle.architectures.multimodal import FAMILIES as OF_IMAGES
from bundle.errors import UsageError, did_you_mean, nearest, shown

__all__ = [
    "MLA",
    "SUPPORTED",
    "Architecture",
    "DeltaNet",
    "MoE",
    "RopeScaling",
    "Vision",
    "from_config",
    "padded_vocabulary",
    "read_config",
]

FAMILIES = OF_TEXT | OF_IMAGES
SUPPORTED = tuple(sorted(FAMILIES))
# Families whose layers megatron-core has, and nobody here builds.
_TOWER = "its vision tower beside gated delta nets is not built here; directories of its text model are read:"
_NOT_BUILT = {family: f"{_TOWER} {family}_text" for family in ("qwen3_5", "qwen3_5_moe")}


def from_config(config: Mapping[str, Any], origin: str = "config") -> Architecture:
    """The Architecture that a Hugging Face config describes.

    Raises UsageError with every violation at once: missing, mistyped and impossible values, unknown keys, and
    keys that ask for a computation which would not happen.
    """
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in _NOT_BUILT:
        raise UsageError(
            f"{origin}: this model is not supported", [f"model_type {model_type}: {_NOT_BUILT[model_type]}"]
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        near = did_you_mean(nearest(str(model_type), FAMILIES))
        supported = f"supported: {', '.join(SUPPORTED)}"
        raise UsageError(
            f"{origin}: this model is not supported",
            [f"model_type: {shown(model_type)} is not supported{near}; {supported}"],
        )
    keys = Keys(config)
    architecture = FAMILIES[model_type](keys)
    keys.rest()
    if not keys.unreadable:
        keys.violations += contradictions(architecture)
    if keys.violations:
        raise UsageError(
            f"{origin}: this {model_type} model is impossible or not supported",
            [files.printable(violation) for violation in keys.violations],  # keys are somebody else's
        )
    return architecture


def read_config(directory: Path) -> dict[str, Any]:
    """The mapping in `directory`/config.json. Raises UsageError when there is no such object."""
    return files.json_object(directory / "config.json", "model.path must hold a Hugging Face config.json")
