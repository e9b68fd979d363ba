"""The references' weights as their family publishes them, where that has words of its own."""

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
        case "gpt_oss":
            return of_gpt_oss(values)
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


def of_gpt_oss(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The experts of a layer are one tensor, [expert, in, out]; gate and up take turns in the last."""
    found = {
        re.sub(r"\.mlp\.gate\.", ".mlp.router.", name): value
        for name, value in values.items()
        if ".experts." not in name
    }
    for layer in {name.partition(".experts.")[0] for name in values if ".experts." in name}:
        for kind, suffix in (("weight", ""), ("bias", "_bias")):

            def stacked(projection: str, layer: str = layer, kind: str = kind) -> Tensor:
                ending = f".{projection}_proj.{kind}"
                own = [v for name, v in values.items() if name.startswith(layer) and name.endswith(ending)]
                return torch.stack(own).movedim(-1, 1) if kind == "weight" else torch.stack(own)

            both = torch.stack((stacked("gate"), stacked("up")), -1).flatten(-2)
            found[f"{layer}.experts.gate_up_proj{suffix}"] = both
            found[f"{layer}.experts.down_proj{suffix}"] = stacked("down")
    return found
