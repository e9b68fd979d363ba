"""How each family of models reads its Hugging Face config. Defaults are those of `transformers`; where its
classes default to the numbers of one particular model, the key is required here."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bundle.architectures.architecture import MLA, Architecture, DeltaNet, MoE
from bundle.architectures.config import REQUIRED, Keys, Rope, read_rope

MOST_LAYERS = MOST_EXPERTS = 4096  # a table of tensors has them all: published models have 128 and 512
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def _decoder(
    keys: Keys,
    *,
    num_key_value_heads: Any = REQUIRED,
    head_dim: Any = None,
    mixed: bool = False,
    **chosen: Any,
) -> dict:
    """The arguments of an Architecture that all families read alike; `chosen` overrides.

    `mixed`: the family's reader says itself which layer is of what kind.
    """
    heads = keys.integer("num_attention_heads")
    hidden = keys.integer("hidden_size")
    kv_channels = chosen.get("kv_channels") or keys.optional("head_dim", head_dim)
    if kv_channels is None:
        kv_channels, odd = divmod(hidden, heads)
        if odd:
            keys.refuse(
                "head_dim", None, f"hidden_size {hidden} is no multiple of {heads} heads: give head_dim"
            )
    keys.only("hidden_act", "silu", why="only gated SiLU (silu) is computed")
    keys.only("mlp_bias", False, why="biases in feed-forward layers are not computed")
    keys.only("use_mrope", False, why="positions in several dimensions are not computed")
    kinds = keys.value("layer_types") or [FULL]
    if not mixed and (not isinstance(kinds, list) or any(kind != FULL for kind in kinds)):
        keys.refuse("layer_types", kinds, f"only {FULL} is computed")
    groups = keys.optional("num_key_value_heads", num_key_value_heads) or heads
    common = {
        "num_layers": keys.integer("num_hidden_layers", most=MOST_LAYERS),
        "hidden_size": hidden,
        "ffn_hidden_size": chosen.get("ffn_hidden_size") or keys.integer("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": kv_channels,
        "vocab_size": keys.integer("vocab_size"),
        "max_position_embeddings": keys.integer("max_position_embeddings"),
        "tied_embeddings": keys.flag("tie_word_embeddings", False),
        "norm_epsilon": keys.number("rms_norm_eps", 1e-6, most=1.0),
        "attention_dropout": keys.number("attention_dropout", 0.0, most=1.0),
        "initializer_range": keys.number("initializer_range", 0.02, most=10.0),
    }
    if "rotary_base" not in chosen:
        chosen |= _rotary(read_rope(keys))
    return common | chosen


def _rotary(read: Rope) -> dict[str, Any]:
    return {
        "rotary_base": read.base,
        "rotary_fraction": read.fraction,
        "rope_scaling": read.scaling,
        "rotary_sections": read.sections,
        "rotary_interleaved": read.interleaved,
    }


def _no_window(keys: Keys, active: bool = True) -> None:
    """Refuses an active window shorter than the longest sequence: every token must see all before it."""
    window = keys.optional("sliding_window")
    if active and window and window < keys.integer("max_position_embeddings"):
        why = "windowed attention is not computed; null is equal for sequences up to the window"
        keys.refuse("sliding_window", window, why)


def _no_window_in_use(keys: Keys) -> None:
    _no_window(keys, active=keys.flag("use_sliding_window", False))


def _no_output_bias(keys: Keys) -> None:
    why = "this family also puts a bias on o_proj, which megatron-core cannot do alone"
    keys.only("attention_bias", False, why=why)


def llama(keys: Keys) -> Architecture:
    """Llama: grouped queries, no biases."""
    _no_output_bias(keys)
    return Architecture("llama", **_decoder(keys, num_key_value_heads=None))


def mistral(keys: Keys) -> Architecture:
    """Mistral without its window."""
    _no_window(keys)
    return Architecture("mistral", **_decoder(keys))


def mixtral(keys: Keys) -> Architecture:
    """Mixtral: every layer is experts of the feed-forward's width."""
    _no_window(keys)
    keys.only("router_jitter_noise", 0.0, 0, why="noise on the router's input is not computed")
    rotary = _rotary(read_rope(keys, default_base=1e6))
    base = _decoder(keys, norm_epsilon=keys.number("rms_norm_eps", 1e-5, most=1.0), **rotary)
    moe = MoE(
        num_experts=keys.integer("num_local_experts", most=MOST_EXPERTS),
        topk=keys.integer("num_experts_per_tok"),
        ffn_hidden_size=base["ffn_hidden_size"],
        shared_ffn_hidden_size=0,
        layer_pattern=(1,) * base["num_layers"],
        **_on_demand(keys),
    )
    return Architecture("mixtral", **base, moe=moe)


def qwen2(keys: Keys, rope: Rope | None = None) -> Architecture:
    """Qwen2 and 2.5: biases on queries, keys and values."""
    _no_window_in_use(keys)
    return Architecture("qwen2", **_decoder(keys, qkv_bias=True, **_rotary(rope or read_rope(keys))))


def mimo(keys: Keys) -> Architecture:
    """MiMo: Qwen2 with multi-token prediction."""
    _no_window_in_use(keys)
    keys.only("attention_bias", True, why="MiMo's queries, keys and values have a bias")
    return Architecture("mimo", **_decoder(keys, qkv_bias=True, mtp_layers=_mtp(keys)))


def qwen3(keys: Keys, rope: Rope | None = None) -> Architecture:
    """Qwen3: norms on queries and keys."""
    _no_window_in_use(keys)
    _no_output_bias(keys)
    rotary = _rotary(rope or read_rope(keys))
    return Architecture("qwen3", **_decoder(keys, head_dim=REQUIRED, qk_layernorm=True, **rotary))


def qwen3_moe(keys: Keys, rope: Rope | None = None, *, norm_topk_prob: Any = REQUIRED) -> Architecture:
    """Qwen3 with experts in the layers that decoder_sparse_step and mlp_only_layers leave."""
    _no_window_in_use(keys)
    _no_output_bias(keys)
    base = _decoder(keys, qk_layernorm=True, **_rotary(rope or read_rope(keys)))
    # transformers 5 writes num_local_experts for what the published configs call num_experts.
    name = "num_local_experts" if keys.present("num_local_experts") else "num_experts"
    moe = _sparse(
        keys,
        base["num_layers"],
        number=name,
        pre_softmax=not keys.flag("norm_topk_prob", norm_topk_prob),
    )
    return Architecture("qwen3_moe", **base, moe=moe)


def _sparse(keys: Keys, layers: int, **routing: Any) -> MoE:
    """Experts in the layers that decoder_sparse_step and mlp_only_layers leave."""
    step = keys.integer("decoder_sparse_step", 1)
    dense = set(keys.integers("mlp_only_layers"))
    return _of_layers(
        keys, tuple(int(i not in dense and (i + 1) % step == 0) for i in range(layers)), **routing
    )


def _of_layers(keys: Keys, pattern: tuple[int, ...], number: str = "num_experts", **routing: Any) -> MoE:
    return MoE(
        num_experts=keys.integer(number, most=MOST_EXPERTS),
        topk=keys.integer("num_experts_per_tok"),
        ffn_hidden_size=keys.integer("moe_intermediate_size"),
        layer_pattern=pattern,
        **{"shared_ffn_hidden_size": 0, **_on_demand(keys), **routing},
    )


def qwen3_next(keys: Keys) -> Architecture:
    """Qwen3-Next: gated delta nets in three of four layers, gated attention, experts and a shared one."""
    _no_window_in_use(keys)
    base = _hybrid(keys)
    moe = _sparse(
        keys,
        base["num_layers"],
        pre_softmax=not keys.flag("norm_topk_prob", True),
        shared_ffn_hidden_size=keys.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return Architecture("qwen3_next", **base, moe=moe)


def qwen3_5_text(keys: Keys) -> Architecture:
    """The decoder of Qwen3.5: that of Qwen3-Next without experts."""
    _as_published(keys)
    return Architecture("qwen3_5_text", **_hybrid(keys, rope=_rope_of_text(keys)))


def qwen3_5_moe_text(keys: Keys) -> Architecture:
    """The decoder of Qwen3.5-MoE: experts in every layer, whose weights for a token always sum to one."""
    _as_published(keys)
    shared = keys.integer("shared_expert_intermediate_size")
    base = _hybrid(keys, rope=_rope_of_text(keys), ffn_hidden_size=shared)  # there is no dense layer
    pattern = (1,) * base["num_layers"]
    moe = _of_layers(keys, pattern, shared_ffn_hidden_size=shared, shared_gate=True)
    return Architecture("qwen3_5_moe_text", **base, moe=moe)


def _as_published(keys: Keys) -> None:
    """What Qwen3.5's configs say besides, of which transformers' class reads nothing."""
    keys.only("attn_output_gate", True, why="this family's attention has a gate")
    keys.only("output_gate_type", "swish", why="the nets' gate is a swish")
    keys.only("mlp_only_layers", [], why="all feed-forward layers of this family are alike")
    for of_serving in ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        keys.value(of_serving)


def _rope_of_text(keys: Keys) -> Rope:
    """Positions in time, height and width, which are one number where there are no images."""
    stretching = keys.mapping("rope_parameters") or keys.mapping("rope_scaling")
    read = read_rope(keys, default_fraction=0.25, multimodal="mrope_section" in stretching, interleaved=True)
    return read._replace(sections=(), interleaved=False)


def _hybrid(keys: Keys, rope: Rope | None = None, **chosen: Any) -> dict[str, Any]:
    """The decoder of Qwen3-Next and Qwen3.5."""
    _no_output_bias(keys)
    rotary = _rotary(rope or read_rope(keys, default_fraction=0.25))
    base = _decoder(
        keys,
        head_dim=256,
        mixed=True,
        qk_layernorm=True,
        output_gate=True,
        zero_centered_norms=True,
        **rotary,
        **chosen,
    )
    net = DeltaNet(
        num_key_heads=keys.integer("linear_num_key_heads", 16),
        num_value_heads=keys.integer("linear_num_value_heads", 32),
        key_head_dim=keys.integer("linear_key_head_dim", 128),
        value_head_dim=keys.integer("linear_value_head_dim", 128),
        convolution=keys.integer("linear_conv_kernel_dim", 4),
        layers=_linear(keys, base["num_layers"]),
    )
    return base | {"delta_net": net if any(net.layers) else None}


def _linear(keys: Keys, layers: int) -> tuple[int, ...]:
    """Which layers have gated delta nets; all but every fourth, if nobody says."""
    every, kinds = keys.integer("full_attention_interval", 4), keys.value("layer_types")
    if kinds is None:
        return tuple(int((number + 1) % every != 0) for number in range(layers))
    if not isinstance(kinds, list) or any(kind not in (FULL, LINEAR) for kind in kinds):
        keys.refuse("layer_types", kinds, f"must be a list of {FULL} and {LINEAR}")
    elif len(kinds) != layers:
        keys.refuse("layer_types", kinds, f"{len(kinds)} of them for num_hidden_layers {layers}")
    else:
        return tuple(int(kind == LINEAR) for kind in kinds)
    return (0,) * layers


def deepseek_v2(keys: Keys) -> Architecture:
    """DeepSeek-V2: MLA, shared experts, choice by a softmax over all experts; of the best groups (236B)."""
    keys.only("scoring_func", "softmax", why="DeepSeek-V2 scores by softmax")
    keys.only(
        "norm_topk_prob", False, why="megatron-core does not renormalise after a softmax over all experts"
    )
    keys.only("topk_method", "greedy", "group_limited_greedy", why="DeepSeek-V2 knows no other choice")
    if keys.value("topk_method") == "group_limited_greedy":
        groups = _groups(keys, score_topk=1)
    else:
        groups = {}
        for without_effect_on_greedy in ("n_group", "topk_group"):
            keys.optional(without_effect_on_greedy)
    return Architecture("deepseek_v2", **_latent(keys, score_function="softmax", pre_softmax=True, **groups))


def deepseek_v3(keys: Keys) -> Architecture:
    """DeepSeek-V3: MLA, sigmoid scores with a steering bias, groups of experts, multi-token prediction."""
    return Architecture("deepseek_v3", **_latent(keys, **_sigmoid(keys)), mtp_layers=_mtp(keys))


def kimi_k2(keys: Keys) -> Architecture:
    """Kimi-K2: DeepSeek-V3 under a name of its own."""
    return replace(deepseek_v3(keys), model_type="kimi_k2")


def glm4_moe(keys: Keys) -> Architecture:
    """GLM-4.5: DeepSeek-V3's experts and multi-token prediction over partly rotated grouped queries."""
    base = _decoder(
        keys,
        norm_epsilon=keys.number("rms_norm_eps", 1e-5, most=1.0),
        qkv_bias=keys.flag("attention_bias", False),
        qk_layernorm=keys.flag("use_qk_norm", False),
        mtp_layers=_mtp(keys),
        **_rotary(read_rope(keys, default_fraction=0.5)),
    )
    return Architecture("glm4_moe", **base, moe=_shared_experts(keys, base["num_layers"], **_sigmoid(keys)))


def gpt_oss(keys: Keys) -> Architecture:
    """gpt-oss: sinks, windows in every other layer, biases everywhere, experts behind a clamped gate."""
    keys.only("attention_bias", True, why="gpt-oss has biases on queries, keys, values and outputs")
    keys.only("swiglu_alpha", 1.702, why="megatron-core's gate knows 1.702 alone")
    if not (keys.present("rope_parameters") or keys.present("rope_scaling")):
        keys.refuse("rope_scaling", None, "transformers would take gpt-oss-20b's for a missing one")
    rotary = _rotary(read_rope(keys, default_base=150000.0))
    base = _decoder(
        keys,
        head_dim=64,
        mixed=True,
        norm_epsilon=keys.number("rms_norm_eps", 1e-5, most=1.0),
        linear_bias=True,
        gate_limit=keys.number("swiglu_limit", 7.0, least=1e-3),
        sinks=True,
        qkv_bias=True,
        **rotary,
    )
    topk, scaling = keys.integer("num_experts_per_tok"), base["rope_scaling"]
    # What its makers' own code calls two of these.
    keys.only("experts_per_token", None, topk, why=f"num_experts_per_tok says {topk}")
    original = scaling.original_max_position_embeddings if scaling else None
    keys.only("initial_context_length", None, original, why=f"the rotary parameters say {original}")
    moe = MoE(
        num_experts=keys.integer("num_local_experts", most=MOST_EXPERTS),
        topk=topk,
        ffn_hidden_size=base["ffn_hidden_size"],
        shared_ffn_hidden_size=0,
        layer_pattern=(1,) * base["num_layers"],
        **_on_demand(keys),
    )
    return Architecture("gpt_oss", **base, **_windows(keys, base["num_layers"]), moe=moe)


def _windows(keys: Keys, layers: int) -> dict[str, Any]:
    """Which layers see a window alone, and how long it is; every other one, the first too, if nobody says."""
    kinds = keys.value("layer_types")
    if kinds is None:
        kinds = [FULL if number % 2 else SLIDING for number in range(layers)]
    if not isinstance(kinds, list) or any(kind not in (FULL, SLIDING) for kind in kinds):
        keys.refuse("layer_types", kinds, f"must be a list of {FULL} and {SLIDING}")
        return {}
    if len(kinds) != layers:
        keys.refuse("layer_types", kinds, f"{len(kinds)} of them for num_hidden_layers {layers}")
    window = keys.optional("sliding_window", 128)
    if window is None or SLIDING not in kinds:
        return {}
    return {"window": window, "windows": tuple(int(kind == SLIDING) for kind in kinds)}


def _latent(keys: Keys, **routing: Any) -> dict[str, Any]:
    """DeepSeek's decoder: multi-head latent attention and experts behind the first dense layers."""
    mla = MLA(
        q_lora_rank=keys.optional("q_lora_rank", REQUIRED),
        kv_lora_rank=keys.integer("kv_lora_rank"),
        qk_head_dim=keys.integer("qk_nope_head_dim"),
        qk_pos_emb_head_dim=keys.integer("qk_rope_head_dim"),
        v_head_dim=keys.integer("v_head_dim"),
    )
    heads = keys.integer("num_attention_heads")
    keys.only("attention_bias", False, why="biases in latent attention are not computed")
    keys.only("rope_interleave", True, why="megatron-core's latent attention rotates interleaved pairs")
    keys.only("num_key_value_heads", None, heads, why=f"latent attention has one per head, {heads}")
    # transformers 5 writes what follows from the numbers above.
    keys.only("qk_head_dim", None, mla.q_head_dim, why="must be qk_nope_head_dim + qk_rope_head_dim")
    keys.only("head_dim", None, mla.qk_pos_emb_head_dim, why="must be qk_rope_head_dim")
    base = _decoder(keys, num_key_value_heads=None, kv_channels=mla.v_head_dim, qk_layernorm=True, mla=mla)
    return base | {"moe": _shared_experts(keys, base["num_layers"], **routing)}


def _shared_experts(keys: Keys, layers: int, **routing: Any) -> MoE:
    width = keys.integer("moe_intermediate_size")
    first = keys.integer("first_k_dense_replace", least=0)
    every = keys.integer("moe_layer_freq", 1)
    shared = keys.integer("n_shared_experts", least=0) if keys.present("n_shared_experts") else 0
    return MoE(
        num_experts=keys.integer("n_routed_experts", most=MOST_EXPERTS),
        topk=keys.integer("num_experts_per_tok"),
        ffn_hidden_size=width,
        shared_ffn_hidden_size=width * shared,
        layer_pattern=tuple(int(i >= first and i % every == 0) for i in range(layers)),
        scaling_factor=keys.number("routed_scaling_factor"),
        aux_loss_coeff=keys.number("aux_loss_alpha", 0.0),
        aux_loss_per_sequence=keys.flag("seq_aux", False),
        **routing,
    )


def _sigmoid(keys: Keys) -> dict[str, Any]:
    """Routing by sigmoid scores, a steering bias, and the best groups where there is more than one."""
    keys.only("scoring_func", "sigmoid", why="this family scores by sigmoid")
    keys.only("topk_method", "noaux_tc", why="this family's choice is noaux_tc")
    keys.only("norm_topk_prob", True, why="megatron-core always normalises sigmoid scores of several experts")
    if keys.integer("num_experts_per_tok") == 1:
        keys.refuse("num_experts_per_tok", 1, "megatron-core does not normalise the score of a single expert")
    return {"score_function": "sigmoid", "expert_bias": True} | _groups(keys, score_topk=2)


def _groups(keys: Keys, score_topk: int) -> dict[str, int]:
    """The groups of experts, of which the best are chosen from; empty where all are one group."""
    groups, chosen = keys.integer("n_group"), keys.integer("topk_group")
    return {"groups": groups, "group_topk": chosen, "group_score_topk": score_topk} if groups > 1 else {}


def _on_demand(keys: Keys) -> dict[str, Any]:
    """The balancing loss as transformers has it: its coefficient counts only with output_router_logits.

    Published configs name a coefficient and leave that false. DeepSeek's own code knows no such switch.
    """
    coefficient = keys.number("router_aux_loss_coef", 0.0)
    asked = keys.flag("output_router_logits", False)
    return {"aux_loss_coeff" if asked else "unused_aux_loss_coeff": coefficient}


def _mtp(keys: Keys) -> int:
    return keys.integer("num_nextn_predict_layers", 0, least=0, most=64)


FAMILIES: dict[str, Callable[[Keys], Architecture]] = {
    read.__name__: read
    for read in (
        llama, mistral, mixtral, qwen2, mimo, qwen3, qwen3_moe, deepseek_v2, deepseek_v3, kimi_k2, glm4_moe,
        gpt_oss, qwen3_next, qwen3_5_text, qwen3_5_moe_text,
    )
}  # fmt: skip
