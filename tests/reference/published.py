"""The references' weights as their family publishes them: MiMo and Mixtral have words of their own."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from tests.reference.layers import Config

# MiMo's words for an MTP layer's own modules; the references have DeepSeek's.
_MIMO = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "shared_head.norm": "final_layernorm",
}
_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def published(config: Config, drawn: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `weights.drawn` returned, under the names of the family."""
    values = {name: value.detach() for name, value in drawn.items()}
    match config["model_type"]:
        case "mimo":
            return dict(_of_mimo(config, *item) for item in values.items())
        case "mixtral":
            return {_of_mixtral(name): value for name, value in values.items()}
    return values


def _of_mimo(config: Config, name: str, value: Tensor) -> tuple[str, Tensor]:
    """An MTP layer stands apart, and its projection reads [hidden, embedding]."""
    at = re.fullmatch(r"model\.layers\.(\d+)\.(.*)\.(weight|bias)", name)
    if at is None or int(at[1]) < config["num_hidden_layers"]:
        return name, value
    if at[2] == "eh_proj":
        hidden = config["hidden_size"]
        value = torch.cat([value[:, hidden:], value[:, :hidden]], 1)
    depth = int(at[1]) - config["num_hidden_layers"]
    return f"model.mtp_layers.{depth}.{_MIMO.get(at[2], at[2])}.{at[3]}", value


def _of_mixtral(name: str) -> str:
    for theirs, its in _MIXTRAL.items():
        name = re.sub(rf"(experts\.\d+)\.{theirs}", rf"\1.{its}", name)
    return name.replace(".mlp.", ".block_sparse_moe.")
