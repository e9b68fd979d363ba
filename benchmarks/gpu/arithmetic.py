"""The floating-point operations that training a model takes, from its dimensions alone."""

from bundle.architectures import Architecture, MoE


def flops(model: Architecture, length: int) -> float:
    """Operations per token of a sequence of `length` tokens, forward and backward, nothing computed twice.

    6 for each weight of a matrix that a token meets (2 forward, 4 backward), and causal attention at half of
    its square. The embedding is a look-up; norms, the router and everything elementwise are left out.
    """
    heads, hidden = model.num_attention_heads, model.hidden_size
    layers = model.num_layers + model.mtp_layers
    key, value = model.head_dims
    attention = _attention_weights(model) + length / 2 * heads * (key + value)
    heads_of_model = (1 + model.mtp_layers) * hidden * model.vocab_size
    joining = model.mtp_layers * 2 * hidden * hidden  # the MTP layer's projection of hidden state and token
    return 6 * (layers * attention + _mlp_weights(model) + heads_of_model + joining)


def _attention_weights(model: Architecture) -> int:
    hidden, heads = model.hidden_size, model.num_attention_heads
    mla = model.mla
    if mla is None:
        return hidden * model.kv_channels * (2 * heads + 2 * model.num_query_groups)
    key = mla.q_head_dim
    query = hidden * heads * key if mla.q_lora_rank is None else mla.q_lora_rank * (hidden + heads * key)
    down = hidden * (mla.kv_lora_rank + mla.qk_pos_emb_head_dim)
    up = mla.kv_lora_rank * heads * (mla.qk_head_dim + mla.v_head_dim)
    return query + down + up + heads * mla.v_head_dim * hidden


def _mlp_weights(model: Architecture) -> int:
    """Of all layers that one token meets; MTP layers are like the last one."""
    pattern = (*model.layer_pattern, *model.layer_pattern[-1:] * model.mtp_layers)
    experts = pattern.count(1) * _expert_width(model.moe) if model.moe else 0
    return 3 * model.hidden_size * (pattern.count(0) * model.ffn_hidden_size + experts)


def _expert_width(moe: MoE) -> int:
    return moe.topk * moe.ffn_hidden_size + moe.shared_ffn_hidden_size
