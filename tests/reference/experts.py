"""Mixtures of experts: which layers have them, how a token chooses, and what it gets."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.reference.layers import Config, Weights, clamped_feed_forward, feed_forward, project, under

STEERED = ("deepseek_v3", "kimi_k2", "glm4_moe")  # sigmoid scores, and a bias that steers the choice
_DEEPSEEK_LIKE = ("deepseek_v2", *STEERED)


def number(config: Config) -> int:
    """Routed experts of a layer that has them; 0 for a family without."""
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    return next((int(config[name]) for name in names if config.get(name)), 0)


def width(config: Config) -> int:
    """Inner width of one expert."""
    of_dense = config["model_type"] in ("mixtral", "gpt_oss")
    return int(config["intermediate_size" if of_dense else "moe_intermediate_size"])


def stand_in(config: Config, layer: int) -> bool:
    """Whether decoder layer `layer` has experts; layers of multi-token prediction are like the last one."""
    layer = min(layer, config["num_hidden_layers"] - 1)
    family = config["model_type"]
    if family in _DEEPSEEK_LIKE:
        return bool(layer >= config["first_k_dense_replace"] and layer % config.get("moe_layer_freq", 1) == 0)
    if family == "qwen3_moe":
        dense = config.get("mlp_only_layers") or ()
        return bool(layer not in dense and (layer + 1) % config.get("decoder_sparse_step", 1) == 0)
    return bool(family in ("mixtral", "gpt_oss"))


def mixture(config: Config, weights: Weights, x: Tensor) -> Tensor:
    """The chosen experts' results for tokens `x` [n, h], weighted, with those of the shared experts."""
    shares = _shares(config, weights, x)
    found = torch.zeros_like(x)
    for expert in range(number(config)):
        rows = shares[:, expert].nonzero()[:, 0]
        if len(rows):
            own = under(weights, f"experts.{expert}.")
            if config["model_type"] == "gpt_oss":
                result = clamped_feed_forward(x[rows], own, config.get("swiglu_limit", 7.0))
            else:
                result = feed_forward(x[rows], own)
            found = found.index_add(0, rows, result * shares[rows, expert, None])
    if config.get("n_shared_experts"):
        found = found + feed_forward(x, under(weights, "shared_experts."))
    return found


def _shares(config: Config, weights: Weights, x: Tensor) -> Tensor:
    """The weight of each expert in each token's result [n, experts]; 0: not chosen."""
    logits = project(x, weights, "gate")
    family, k = config["model_type"], config["num_experts_per_tok"]
    if family in STEERED:
        scores, ranked = logits.sigmoid(), logits.sigmoid() + weights["gate.e_score_correction_bias"]
        ranked = _in_best_groups(ranked, config, by=2)
    else:
        scores = ranked = logits.softmax(-1)
        if config.get("topk_method") == "group_limited_greedy":
            ranked = _in_best_groups(ranked, config, by=1)
    chosen = ranked.topk(k, -1).indices
    picked = scores.gather(-1, chosen)
    if _normalised(config):
        picked = picked / picked.sum(-1, keepdim=True)
    if family in _DEEPSEEK_LIKE:
        picked = picked * config["routed_scaling_factor"]
    return torch.zeros_like(scores).scatter(-1, chosen, picked)


def _normalised(config: Mapping[str, Any]) -> bool:
    """Whether the weights of the chosen experts sum to one before they are scaled."""
    if config["model_type"] == "qwen3_moe":
        return bool(config["norm_topk_prob"])
    return bool(config["model_type"] != "deepseek_v2")


def _in_best_groups(ranked: Tensor, config: Mapping[str, Any], by: int) -> Tensor:
    """Scores [n, experts], minus infinity outside of the best groups: those whose `by` best sum highest."""
    grouped = ranked.unflatten(-1, (config["n_group"], -1))
    best = grouped.topk(by, -1).values.sum(-1).topk(config["topk_group"], -1).indices
    kept = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter(-1, best, True)
    return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
