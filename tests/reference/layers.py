"""What the layers of all families are made of: norms, projections, gated feed-forward layers, attention."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.reference import rotary

Config = Mapping[str, Any]
Weights = Mapping[str, Tensor]

LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")  # families with latent attention

# transformers gives the norms of latent attention no epsilon of the config.
LATENT_NORM_EPSILON = 1e-6


def under(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """The weights whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`x` [..., h] over the root of its mean square, times `weight` [h]."""
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight


def norm_epsilon(config: Config) -> float:
    """That of all norms but latent attention's."""
    default = 1e-5 if config["model_type"] in ("mixtral", "glm4_moe", "gpt_oss") else 1e-6
    return float(config.get("rms_norm_eps", default))


def project(x: Tensor, weights: Weights, name: str) -> Tensor:
    """`x` through a linear layer, with its bias if it has one."""
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def feed_forward(x: Tensor, weights: Weights) -> Tensor:
    """SiLU of the gate, times the other projection, projected back."""
    return project(
        F.silu(project(x, weights, "gate_proj")) * project(x, weights, "up_proj"), weights, "down_proj"
    )


def clamped_feed_forward(x: Tensor, weights: Weights, limit: float) -> Tensor:
    """gpt-oss: a gate that ends at `limit`, and one more than a projection that ends there on both sides."""
    gate = project(x, weights, "gate_proj").clamp(max=limit)
    up = project(x, weights, "up_proj").clamp(-limit, limit)
    return project(gate * torch.sigmoid(1.702 * gate) * (up + 1), weights, "down_proj")


def attention(config: Config, weights: Weights, x: Tensor, layer: int) -> Tensor:
    """Causal self-attention of a layer over one sequence `x` [n, h]."""
    if config["model_type"] in LATENT:
        heads = _latent(config, weights, x)
    else:
        heads = _grouped(config, weights, x, window(config, layer))
    return project(heads, weights, "o_proj")


def window(config: Config, layer: int) -> int | None:
    """How many tokens one sees in a layer, itself the last; None: all before it."""
    if config["model_type"] != "gpt_oss":
        return None
    kinds = config.get("layer_types") or ["sliding_attention", "full_attention"] * config["num_hidden_layers"]
    return config.get("sliding_window", 128) if kinds[layer] == "sliding_attention" else None


def head_width(config: Config) -> int:
    """Values of one head where attention is not latent."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def kv_heads(config: Config) -> int:
    """Heads of keys and values."""
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def _grouped(config: Config, weights: Weights, x: Tensor, window: int | None) -> Tensor:
    n, width, epsilon = len(x), head_width(config), norm_epsilon(config)
    q, k, v = (project(x, weights, f"{name}_proj").view(n, -1, width) for name in "qkv")
    if "q_norm.weight" in weights:
        q, k = norm(q, weights["q_norm.weight"], epsilon), norm(k, weights["k_norm.weight"], epsilon)
    turns = rotary.table(config, int(width * rotary.settings(config)["fraction"]), n)
    q, k = rotary.turn_halves(q, turns), rotary.turn_halves(k, turns)
    each = config["num_attention_heads"] // kv_heads(config)
    k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
    return _attended(q, k, v, 1.0, window, weights.get("sinks"))


def _latent(config: Config, weights: Weights, x: Tensor) -> Tensor:
    n, heads = len(x), config["num_attention_heads"]
    still, turned, wide = (config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if config["q_lora_rank"] is None:
        q = project(x, weights, "q_proj")
    else:
        low = project(x, weights, "q_a_proj")
        q = project(norm(low, weights["q_a_layernorm.weight"], LATENT_NORM_EPSILON), weights, "q_b_proj")
    low, k_turned = project(x, weights, "kv_a_proj_with_mqa").split((config["kv_lora_rank"], turned), -1)
    kv = project(norm(low, weights["kv_a_layernorm.weight"], LATENT_NORM_EPSILON), weights, "kv_b_proj")
    q_still, q_turned = q.view(n, heads, -1).split((still, turned), -1)
    k_still, v = kv.view(n, heads, -1).split((still, wide), -1)
    turns = rotary.table(config, turned, n)
    q = torch.cat((q_still, rotary.turn_pairs(q_turned, turns)), -1)
    k = torch.cat((k_still, rotary.turn_pairs(k_turned[:, None], turns).expand(n, heads, turned)), -1)
    return _attended(q, k, v, rotary.softmax_factor(config))


def _attended(
    q: Tensor, k: Tensor, v: Tensor, factor: float, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """What each position takes of those up to its own [n, heads * width]; q, k, v are [n, heads, width].

    Of so many at most, and as if one more had the logit of the head's sink [heads], and nothing to give.
    """
    n = len(q)
    logits = torch.einsum("nhd,mhd->hnm", q, k) * (factor / math.sqrt(q.shape[-1]))
    before = torch.arange(n)[:, None] - torch.arange(n)
    hidden = (before < 0) | (before >= (window or n))
    exponentials = logits.masked_fill(hidden, -math.inf).exp()
    total = exponentials.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    weights = exponentials / total
    return torch.einsum("hnm,mhd->nhd", weights, v).flatten(1)
