"""The plain models compute what transformers computes, for every family that it has."""

import copy

import pytest
import torch

from tests.reference import model
from tests.reference.configs import CONFIGS
from tests.reference.layers import Config
from tests.reference.published import of_gpt_oss
from tests.reference.weights import drawn

# Layers that the published code of DeepSeek places by this key, which transformers does not read.
UNREAD = ("moe_layer_freq",)
SAME = {"kimi_k2": "deepseek_v3"}  # by the class that its repository names
THERE = [name for name, config in CONFIGS.items() if config["model_type"] != "mimo"]


def state(config: Config, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights as transformers holds them: the experts of a layer in two tensors."""
    if config["model_type"] == "gpt_oss":
        return of_gpt_oss({name: tensor.detach() for name, tensor in weights.items()})
    found = {name: tensor.detach() for name, tensor in weights.items() if ".experts." not in name}
    layers = {name.partition(".experts.")[0] for name in weights if ".experts." in name}
    for layer in layers:

        def stacked(projection: str, layer: str = layer) -> torch.Tensor:
            names = [name for name in weights if name.startswith(f"{layer}.experts.") and projection in name]
            return torch.stack([weights[name].detach() for name in names])

        found[f"{layer}.experts.gate_up_proj"] = torch.cat((stacked("gate_proj"), stacked("up_proj")), 1)
        found[f"{layer}.experts.down_proj"] = stacked("down_proj")
    behind = tuple(f"model.layers.{config['num_hidden_layers'] + depth}." for depth in range(9))
    return {name: tensor for name, tensor in found.items() if not name.startswith(behind)}


@pytest.mark.parametrize("name", THERE)
def test_logits(name):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    # transformers writes into what it is given.
    config = {key: value for key, value in copy.deepcopy(CONFIGS[name]).items() if key not in UNREAD}
    family = SAME.get(config["model_type"], config["model_type"])
    settings = transformers.AutoConfig.for_model(**(config | {"model_type": family}))
    theirs = transformers.AutoModelForCausalLM.from_config(
        settings, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    weights = drawn(config, seed=3)
    missing, unexpected = theirs.load_state_dict(state(config, weights), strict=False)
    assert not unexpected
    # A tied head is no weight of its own; a family that always has shared experts has them of width 0.
    assert all(theirs.state_dict()[name].numel() == 0 or "lm_head" in name for name in missing)
    assert "lm_head.weight" not in missing or config["tie_word_embeddings"]
    ids = torch.randint(config["vocab_size"], (37,), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        wanted = theirs.eval()(ids[None]).logits[0]
        seen = model.heads(config, weights, ids)[0]
    # Their norms, routers and softmax are computed in float32.
    torch.testing.assert_close(seen, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
