"""The weights of a config, drawn from (seed, published name), and as megatron-core lays them out."""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from tests.reference import experts
from tests.reference.layers import LATENT, Config, head_width, kv_heads
from tests.reference.model import depths

Shape = tuple[int, ...]
_BIAS = "mlp.gate.e_score_correction_bias"  # steers the choice of experts; nothing differentiates it


def shapes(config: Config) -> dict[str, Shape]:
    """Every weight's shape."""
    hidden, rows, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    found: dict[str, Shape] = {"model.embed_tokens.weight": (rows, hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = (rows, hidden)
    for layer in range(layers + depths(config)):
        own = dict(_layer(config, layer))
        if layer >= layers:
            own |= dict.fromkeys(("enorm.weight", "hnorm.weight", "shared_head.norm.weight"), (hidden,))
            own["eh_proj.weight"] = (hidden, 2 * hidden)
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return found


def drawn(config: Config, seed: int) -> dict[str, Tensor]:
    """Random float64 weights that float32 holds exactly; no norm is one and no bias zero."""
    found = {}
    for name, shape in shapes(config).items():
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        values = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            values = 0.3 * values + (0.0 if name.endswith("bias") else 1.0)
        else:  # embeddings so small that the first norm's epsilon counts, and a tied head is not sure
            values = values * (0.3 if "embed_tokens" in name else 1 / math.sqrt(shape[1]))
        found[name] = values.double().requires_grad_(not name.endswith(_BIAS))
    return found


def megatron_layout(config: Config, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published tensors (weights, or their gradients) under the names and in the layouts of megatron-core.

    Queries, keys and values stand group by group, gate before up; a layer of multi-token prediction keeps its
    decoder layer inside. Layers are numbered over all stages and experts over all ranks.
    """
    found = {
        "embedding.word_embeddings.weight": named["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": named["model.norm.weight"],
    }
    if "lm_head.weight" in named:
        found["output_layer.weight"] = named["lm_head.weight"]
    layers = config["num_hidden_layers"]
    for layer in range(layers + depths(config)):
        prefix = f"model.layers.{layer}."
        own = {name.removeprefix(prefix): t for name, t in named.items() if name.startswith(prefix)}
        place = f"decoder.layers.{layer}."
        if layer >= layers:
            outer = f"mtp.layers.{layer - layers}."
            for theirs in ("enorm", "hnorm", "eh_proj"):
                found[f"{outer}{theirs}.weight"] = own.pop(f"{theirs}.weight")
            found[f"{outer}final_layernorm.weight"] = own.pop("shared_head.norm.weight")
            place = f"{outer}transformer_layer."
        found |= {place + name: tensor for name, tensor in _megatron_layer(config, own)}
    return found


def _layer(config: Config, layer: int) -> Iterator[tuple[str, Shape]]:
    hidden = config["hidden_size"]
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    for name, shape in (_latent if config["model_type"] in LATENT else _grouped)(config):
        yield f"self_attn.{name}", shape
    if not experts.stand_in(config, layer):
        yield from _feed_forward("mlp.", hidden, config["intermediate_size"])
        return
    yield "mlp.gate.weight", (experts.number(config), hidden)
    if config["model_type"] in experts.STEERED:
        yield _BIAS, (experts.number(config),)
    biased = config["model_type"] == "gpt_oss"
    if biased:
        yield "mlp.gate.bias", (experts.number(config),)
    for expert in range(experts.number(config)):
        yield from _feed_forward(f"mlp.experts.{expert}.", hidden, experts.width(config), biased=biased)
    if shared := config.get("n_shared_experts"):
        yield from _feed_forward("mlp.shared_experts.", hidden, shared * experts.width(config))


def _feed_forward(
    prefix: str, hidden: int, inner: int, *, biased: bool = False
) -> Iterator[tuple[str, Shape]]:
    for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
        yield f"{prefix}{name}_proj.weight", (rows, columns)
        if biased:
            yield f"{prefix}{name}_proj.bias", (rows,)


def _grouped(config: Config) -> Iterator[tuple[str, Shape]]:
    hidden, width, family = config["hidden_size"], head_width(config), config["model_type"]
    outputs = {"q": config["num_attention_heads"], "k": kv_heads(config), "v": kv_heads(config)}
    for name, heads in outputs.items():
        yield f"{name}_proj.weight", (heads * width, hidden)
        if family in ("qwen2", "mimo", "gpt_oss") or (family == "glm4_moe" and config.get("attention_bias")):
            yield f"{name}_proj.bias", (heads * width,)
    if family in ("qwen3", "qwen3_moe") or config.get("use_qk_norm"):
        yield from ((f"{name}_norm.weight", (width,)) for name in "qk")
    yield "o_proj.weight", (hidden, outputs["q"] * width)
    if family == "gpt_oss":
        yield "o_proj.bias", (hidden,)
        yield "sinks", (outputs["q"],)


def _latent(config: Config) -> Iterator[tuple[str, Shape]]:
    hidden, heads, low = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    still, turned, wide = (config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if (rank := config["q_lora_rank"]) is None:
        yield "q_proj.weight", (heads * (still + turned), hidden)
    else:
        yield "q_a_proj.weight", (rank, hidden)
        yield "q_a_layernorm.weight", (rank,)
        yield "q_b_proj.weight", (heads * (still + turned), rank)
    yield "kv_a_proj_with_mqa.weight", (low + turned, hidden)
    yield "kv_a_layernorm.weight", (low,)
    yield "kv_b_proj.weight", (heads * (still + wide), low)
    yield "o_proj.weight", (hidden, heads * wide)


_RENAMED = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
    "self_attn.o_proj": "self_attention.linear_proj",
    "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
    "self_attn.q_a_layernorm": "self_attention.q_layernorm",
    "self_attn.q_b_proj": "self_attention.linear_q_up_proj",
    "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
    "self_attn.kv_a_layernorm": "self_attention.kv_layernorm",
    "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
    "mlp.gate": "mlp.router",
}


def _megatron_layer(config: Config, own: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    grouped = "self_attn.k_proj.weight" in own
    for name, tensor in own.items():
        module, _, kind = name.rpartition(".")
        if name == _BIAS:
            yield "mlp.router.expert_bias", tensor
        elif name == "self_attn.sinks":
            yield "self_attention.core_attention.softmax_offset", tensor
        elif module in _RENAMED:
            yield f"{_RENAMED[module]}.{kind}", tensor
        elif module == "self_attn.q_proj":
            if not grouped:
                yield f"self_attention.linear_q_proj.{kind}", tensor
                continue
            parts = [own[f"self_attn.{which}_proj.{kind}"] for which in "qkv"]
            by_group = [part.unflatten(0, (kv_heads(config), -1)) for part in parts]
            yield f"self_attention.linear_qkv.{kind}", torch.cat(by_group, 1).flatten(0, 1)
        elif module.endswith("gate_proj"):
            block = re.sub(r"\bexperts\.", "experts.local_experts.", module.removesuffix("gate_proj"))
            both = torch.cat((tensor, own[name.replace("gate_proj", "up_proj")]))
            yield f"{block}linear_fc1.{kind}", both
            yield f"{block}linear_fc2.{kind}", own[name.replace("gate_proj", "down_proj")]
