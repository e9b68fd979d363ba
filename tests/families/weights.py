"""Where each of our parameters stands in a directory of transformers, written out by hand."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from bundle.architectures import Architecture

_COPIED = {
    "embedding.word_embeddings": "model.embed_tokens",
    "output_layer": "lm_head",
    "decoder.final_layernorm": "model.norm",
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "mlp.linear_fc2": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.shared_experts.linear_fc2": "mlp.shared_experts.down_proj",
}
_LATENT = {
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.q_layernorm": "self_attn.q_a_layernorm",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
}
_GATED = {"mlp.linear_fc1": "mlp", "mlp.shared_experts.linear_fc1": "mlp.shared_experts"}
_OF_QWEN3_NEXT = {
    "mlp.shared_experts.linear_fc2": "mlp.shared_expert.down_proj",
    "self_attention.conv1d": "linear_attn.conv1d",
    "self_attention.out_norm": "linear_attn.norm",
    "self_attention.out_proj": "linear_attn.out_proj",
}


def ours(name: str, theirs: Mapping[str, Tensor], architecture: Architecture) -> Tensor:
    """The tensor that we call `name`; the vocabulary without its padding."""
    path, _, leaf = name.rpartition(".")
    layer, part = "", path
    if found := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", path):
        layer, part = f"model.layers.{found[1]}.", found[2]
    if leaf == "expert_bias":
        return theirs[f"{layer}mlp.gate.e_score_correction_bias"]
    if leaf in ("A_log", "dt_bias"):
        return theirs[f"{layer}linear_attn.{leaf}"]
    if leaf == "gate_weight":
        return theirs[f"{layer}mlp.shared_expert_gate.weight"]
    if part == "self_attention.in_proj":
        return _linear(theirs, f"{layer}linear_attn.", architecture)
    if leaf == "softmax_offset":
        return theirs[f"{layer}self_attn.sinks"]
    if found := re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])", part):
        if f"{layer}mlp.experts.gate_up_proj" in theirs:
            return _of_stack(theirs, f"{layer}mlp.experts.", int(found[1]), found[2], leaf)
        return _expert(theirs, layer, found[1], found[2])
    if part == "self_attention.linear_qkv":
        return _qkv(theirs, f"{layer}self_attn", leaf, architecture)
    if part in _GATED:
        module = _GATED[part] if architecture.delta_net is None else _GATED[part].removesuffix("s")
        both = (f"{layer}{module}.{half}_proj.{leaf}" for half in ("gate", "up"))
        return torch.cat([theirs[one] for one in both])
    if part == "mlp.router" and f"{layer}block_sparse_moe.gate.{leaf}" in theirs:
        return theirs[f"{layer}block_sparse_moe.gate.{leaf}"]
    if part == "mlp.router" and f"{layer}mlp.router.{leaf}" in theirs:
        return theirs[f"{layer}mlp.router.{leaf}"]
    names = _COPIED | _LATENT if architecture.mla else _COPIED
    names = names | _OF_QWEN3_NEXT if architecture.delta_net else names
    return theirs[f"{layer}{names[part]}.{leaf}"]


def _expert(theirs: Mapping[str, Tensor], layer: str, expert: str, linear: str) -> Tensor:
    """Mixtral calls gate, up and down w1, w3 and w2."""
    mixtral = f"{layer}block_sparse_moe.experts.{expert}."
    names = {"1": ("w1", "w3"), "2": ("w2",)}
    if f"{mixtral}w1.weight" not in theirs:
        mixtral = f"{layer}mlp.experts.{expert}."
        names = {"1": ("gate_proj", "up_proj"), "2": ("down_proj",)}
    return torch.cat([theirs[f"{mixtral}{name}.weight"] for name in names[linear]])


def _of_stack(theirs: Mapping[str, Tensor], experts: str, number: int, linear: str, leaf: str) -> Tensor:
    """gpt-oss multiplies from the left; gate and up take turns in what comes out of the first matrix.

    Qwen3-VL-MoE does neither, as transformers 5 writes it.
    """
    name = f"{experts}{'gate_up' if linear == '1' else 'down'}_proj{'_bias' if leaf == 'bias' else ''}"
    if f"{experts.removesuffix('experts.')}gate.weight" in theirs:
        return theirs[name][number]
    out = theirs[name][number].movedim(-1, 0)
    return torch.cat((out[::2], out[1::2])) if linear == "1" else out


def _qkv(theirs: Mapping[str, Tensor], attention: str, leaf: str, architecture: Architecture) -> Tensor:
    """Group by group: the queries of the group, gates behind them if there are any, its key, its value."""
    groups = architecture.num_query_groups
    parts = [theirs[f"{attention}.{one}_proj.{leaf}"].unflatten(0, (groups, -1)) for one in "qkv"]
    if architecture.output_gate:
        heads = parts[0].unflatten(1, (-1, 2, architecture.kv_channels))
        parts[:1] = [heads[:, :, which].flatten(1, 2) for which in (0, 1)]
    return torch.cat(parts, 1).flatten(0, 1)


def _linear(theirs: Mapping[str, Tensor], linear: str, architecture: Architecture) -> Tensor:
    """All queries, keys, values, gates, betas and alphas, which transformers has by heads of keys."""
    net = architecture.delta_net
    assert net is not None
    if f"{linear}in_proj_z.weight" in theirs:
        return torch.cat([theirs[f"{linear}in_proj_{part}.weight"] for part in ("qkv", "z", "b", "a")])
    many = net.num_value_heads // net.num_key_heads
    sizes = [net.key_head_dim, net.key_head_dim, many * net.value_head_dim, many * net.value_head_dim]
    both = (("in_proj_qkvz", sizes), ("in_proj_ba", [many, many]))
    return torch.cat(
        [
            of.flatten(0, 1)
            for name, parts in both
            for of in theirs[f"{linear}{name}.weight"].unflatten(0, (net.num_key_heads, -1)).split(parts, 1)
        ]
    )
