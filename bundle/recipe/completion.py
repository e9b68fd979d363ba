"""The keys that a recipe leaves out, filled in by its model's directory and its task before validation."""

from pathlib import Path
from typing import Any

from bundle import hub
from bundle.architectures.contents import has_chat_template, has_tokenizer, has_weights
from bundle.recipe.data import BYTE_VOCABULARY


def complete(values: dict[str, Any]) -> dict[str, str]:
    """Fill in keys that `values` leave out, in new sections; return where each value comes from, by key.

    Values are whatever somebody wrote: sections and keys of the wrong type are left to the schema.
    """
    origins: dict[str, str] = {}
    model, data = (_section(values, name) for name in ("model", "data"))
    if model is None or data is None:
        return origins
    if model.get("lora") is True:
        model["lora"] = {}
    path = model.get("path")
    if (
        "tokenizer" not in data
        and isinstance(path, str)
        and _names_tokenizer(Path(hub.local_path(path)), model)
    ):
        data["tokenizer"] = f"hf:{path}"
        origins["data.tokenizer"] = "model.path"
    kind, _, tokenizer = str(data.get("tokenizer")).partition(":")
    is_answering = values.get("task") in ("sft", "dpo")
    if (
        "template" not in data
        and kind == "hf"
        and is_answering
        and has_chat_template(Path(hub.local_path(tokenizer)))
    ):
        data["template"] = "chat"
        origins["data.template"] = "the tokenizer has a chat template"
    return origins


def _section(values: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return a copy of a section, put in its place; None where the section is none."""
    section = values.get(name)
    if not isinstance(section, dict):
        return None
    copied = values[name] = dict(section)
    return copied


def _names_tokenizer(path: Path, model: dict[str, Any]) -> bool:
    """Return whether the tokenizer of a model is that of its directory, or must be named."""
    config = model.get("config")
    reads_bytes = isinstance(config, dict) and config.get("vocab_size") == BYTE_VOCABULARY
    loads = model.get("weights") != "random" and has_weights(path)
    return has_tokenizer(path) or (loads and not reads_bytes)
