"""Parameters and FLOPs of every family: as plain PyTorch's own models have them, and torch counts them."""

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bundle.architectures import from_config
from bundle.planning.size import compute_model_size
from tests.planning.jobs import job
from tests.reference import model
from tests.reference.configs import CONFIGS
from tests.reference.layers import window
from tests.reference.weights import drawn, shapes

STEERING = "e_score_correction_bias"  # counts tokens; nothing is learned in it
SHORT, LONG = 7, 19


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


def counted(config, weights, tokens):
    """FLOPs that torch counts in a forward pass, and in the backward pass after it."""
    ids = torch.randint(0, config["vocab_size"], (tokens,))
    with FlopCounterMode(display=False) as forward:
        heads = model.heads(config, weights, ids)
    with FlopCounterMode(display=False) as backward:
        sum(logits.square().sum() for logits in heads).backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.slow
def test_flops_are_those_that_torch_counts(config):
    """The reference computes all n² pairs of positions, of which causality shows a token n (n + 1) / 2."""
    size, weights = compute_model_size(from_config(config)), drawn(config, seed=5)
    (short, _), (long, backward) = (counted(config, weights, n) for n in (SHORT, LONG))
    pair, odd = divmod(long * SHORT - short * LONG, LONG * SHORT * (LONG - SHORT))
    assert not odd
    token = long // LONG - pair * LONG
    assert (size.flops_per_token, size.flops_per_pair + size.flops_per_windowed_pair) == (token, pair)
    assert backward == 2 * long
    tokens, pairs = SHORT + 2 * LONG, sum(n * (n + 1) // 2 for n in (SHORT, LONG, LONG))
    windowed = sum(window(config, layer) is not None for layer in range(config["num_hidden_layers"]))
    of_layer = pair // (config["num_hidden_layers"] + model.depths(config))
    width = config.get("sliding_window", LONG)
    fewer = pairs - sum(min(place, width) for n in (SHORT, LONG, LONG) for place in range(1, n + 1))
    wanted = token * tokens + pair * pairs - windowed * of_layer * fewer
    assert size.count_training_flops([SHORT, LONG, LONG]) == 3 * wanted


@pytest.mark.parametrize("kind", [kind for kind, of in CONFIGS.items() if not of.get("tie_word_embeddings")])
@pytest.mark.slow
def test_frozen_weights_beside_adapters_have_no_flops_of_their_own_gradients(kind):
    """What adapters add is not counted: the embedding stands for them, from where gradients come back."""
    config = CONFIGS[kind]
    lora = {"rank": 2, "alpha": 4, "targets": ["all-linear"]}
    recipe = job(config, model={"lora": lora}, data={"tokenizer": "hf:none"})
    size, weights = compute_model_size(recipe.architecture, recipe.model), drawn(config, seed=5)
    for name, weight in weights.items():
        weight.requires_grad_(name == "model.embed_tokens.weight")
    forward, backward = counted(config, weights, LONG)
    tokens = LONG * size.flops_per_token
    assert size.adapter_parameters and backward == 2 * forward - tokens
    assert size.count_step_flops(LONG, 0, 0) == 2 * tokens


def test_parameters_are_those_of_a_published_checkpoint(config):
    size, layers = compute_model_size(from_config(config)), config["num_hidden_layers"]
    found = {name: math.prod(shape) for name, shape in shapes(config).items() if not name.endswith(STEERING)}
    numbers = {name: [int(part) for part in name.split(".") if part.isdigit()] for name in found}
    mtp = {name for name, at in numbers.items() if at and at[0] >= layers}
    chosen = config.get("num_experts_per_tok", 0)
    idle = {name for name, at in numbers.items() if len(at) > 1 and at[1] >= chosen}
    assert size.mtp_parameters == sum(found[name] for name in mtp)
    assert size.parameters == sum(found.values()) - size.mtp_parameters
    assert size.active_parameters == size.parameters - sum(found[name] for name in idle - mtp)


def test_a_checkpoint_has_the_rows_of_padding_in_every_arithmetic():
    config = CONFIGS["llama"]
    size = compute_model_size(from_config(config))
    rows = 2 * (128 - config["vocab_size"]) * config["hidden_size"]
    stored = size.parameters + rows

    def bytes_of(dtype: str, **optimizer: Any) -> int:
        words = {"tokenizer": "hf:none"}
        made = job(config, model={"dtype": dtype}, data=words, optimizer=optimizer)
        return size.count_checkpoint_bytes(made.model.dtype, made.optimizer)

    assert bytes_of("bf16") == stored * (2 + 4 + 4 + 4)
    assert bytes_of("fp32") == stored * (4 + 4 + 4 + 4)
    assert bytes_of("bf16", use_distributed_optimizer=False) == stored * (2 + 4 + 4 + 4)
    assert bytes_of("fp32", use_distributed_optimizer=False) == stored * (4 + 4 + 4)
    assert bytes_of("bf16", name="sgd") == stored * (2 + 4 + 4)
    assert bytes_of("fp32", name="sgd", sgd_momentum=0.0) == stored * 4
