"""Read a Hugging Face config into data about a model: dimensions, layers, experts and MTP."""

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
    VisionArchitecture,
    find_contradictions,
    pad_vocab_to_lcm,
)
from bundle.architectures.config import ConfigKeys
from bundle.architectures.families import FAMILIES as TEXT_FAMILIES
from bundle.architectures.multimodal import FAMILIES as IMAGE_FAMILIES
from bundle.errors import UsageError, find_nearest, format_suggestion, format_value

__all__ = [
    "MLA",
    "SUPPORTED_FAMILIES",
    "Architecture",
    "DeltaNet",
    "MoE",
    "RopeScaling",
    "VisionArchitecture",
    "from_config",
    "pad_vocab_to_lcm",
    "read_config",
]

FAMILIES = TEXT_FAMILIES | IMAGE_FAMILIES
SUPPORTED_FAMILIES = tuple(sorted(FAMILIES))
# Families whose layers megatron-core has, but which are not built here.
_TOWER_REASON = (
    "its vision tower together with gated delta nets is not supported; its text-only directories are:"
)
_UNSUPPORTED_REASONS = {family: f"{_TOWER_REASON} {family}_text" for family in ("qwen3_5", "qwen3_5_moe")}


def from_config(config: Mapping[str, Any], origin: str = "config") -> Architecture:
    """Return the Architecture that a Hugging Face config describes.

    Raise UsageError with every violation at once: missing, mistyped and impossible values, unknown keys, and
    keys that ask for a computation which is not supported.
    """
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in _UNSUPPORTED_REASONS:
        raise UsageError(
            f"{origin}: this model is not supported",
            [f"model_type {model_type}: {_UNSUPPORTED_REASONS[model_type]}"],
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        suggestion = format_suggestion(find_nearest(str(model_type), FAMILIES))
        supported = f"supported: {', '.join(SUPPORTED_FAMILIES)}"
        raise UsageError(
            f"{origin}: this model is not supported",
            [f"model_type: {format_value(model_type)} is not supported{suggestion}; {supported}"],
        )
    keys = ConfigKeys(config)
    architecture = FAMILIES[model_type](keys)
    keys.add_unknown_key_violations()
    if not keys.has_unreadable:
        keys.violations += find_contradictions(architecture)
    if keys.violations:
        raise UsageError(
            f"{origin}: this {model_type} model is impossible or not supported",
            [files.to_printable(violation) for violation in keys.violations],  # keys come from a foreign file
        )
    return architecture


def read_config(directory: Path) -> dict[str, Any]:
    """Return the mapping in `directory`/config.json. Raise UsageError where there is no such object."""
    return files.read_json_object(
        directory / "config.json", "model.path must be a directory with a Hugging Face config.json"
    )
