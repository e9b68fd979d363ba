"""Read the Hugging Face config of each family of models.

Defaults are those of `transformers`; where its classes default to the numbers of one particular model, the
key is required here.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bundle.architectures.architecture import MLA, Architecture, DeltaNet, MoE
from bundle.architectures.config import REQUIRED, ConfigKeys, Rope, read_rope

MOST_LAYERS = MOST_EXPERTS = 4096  # a table of tensors has them all: published models have 128 and 512
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def _read_decoder(
    keys: ConfigKeys,
    *,
    num_key_value_heads: Any = REQUIRED,
    head_dim: Any = None,
    has_mixed_layers: bool = False,
    **overrides: Any,
) -> dict:
    """Return the arguments of an Architecture that all families read alike, replaced by `overrides`.

    `has_mixed_layers`: the family's reader reads the kinds of layers itself.
    """
    heads = keys.read_integer("num_attention_heads")
    hidden = keys.read_integer("hidden_size")
    kv_channels = overrides.get("kv_channels") or keys.read_optional_integer("head_dim", head_dim)
    if kv_channels is None:
        kv_channels, remainder = divmod(hidden, heads)
        if remainder:
            keys.add_violation(
                "head_dim", None, f"hidden_size {hidden} is not a multiple of {heads} heads; set head_dim"
            )
    keys.add_violation_unless("hidden_act", "silu", reason="only gated SiLU (silu) is supported")
    keys.add_violation_unless("mlp_bias", False, reason="biases in feed-forward layers are not supported")
    keys.add_violation_unless("use_mrope", False, reason="positions in several dimensions are not supported")
    kinds = keys.read_value("layer_types") or [FULL]
    if not has_mixed_layers and (not isinstance(kinds, list) or any(kind != FULL for kind in kinds)):
        keys.add_violation("layer_types", kinds, f"only {FULL} is supported")
    groups = keys.read_optional_integer("num_key_value_heads", num_key_value_heads) or heads
    common = {
        "num_layers": keys.read_integer("num_hidden_layers", most=MOST_LAYERS),
        "hidden_size": hidden,
        "ffn_hidden_size": overrides.get("ffn_hidden_size") or keys.read_integer("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": kv_channels,
        "vocab_size": keys.read_integer("vocab_size"),
        "max_position_embeddings": keys.read_integer("max_position_embeddings"),
        "tied_embeddings": keys.read_flag("tie_word_embeddings", False),
        "norm_epsilon": keys.read_number("rms_norm_eps", 1e-6, most=1.0),
        "attention_dropout": keys.read_number("attention_dropout", 0.0, most=1.0),
        "initializer_range": keys.read_number("initializer_range", 0.02, most=10.0),
    }
    if "rotary_base" not in overrides:
        overrides |= _build_rotary_fields(read_rope(keys))
    return common | overrides


def _build_rotary_fields(rope: Rope) -> dict[str, Any]:
    return {
        "rotary_base": rope.base,
        "rotary_fraction": rope.fraction,
        "rope_scaling": rope.scaling,
        "rotary_sections": rope.sections,
        "rotary_interleaved": rope.interleaved,
    }


def _refuse_short_window(keys: ConfigKeys, is_active: bool = True) -> None:
    """Refuse an active window shorter than the longest sequence: every token must see all before it."""
    window = keys.read_optional_integer("sliding_window")
    if is_active and window and window < keys.read_integer("max_position_embeddings"):
        reason = "windowed attention is not supported; null is equal for sequences up to the window"
        keys.add_violation("sliding_window", window, reason)


def _refuse_active_short_window(keys: ConfigKeys) -> None:
    _refuse_short_window(keys, is_active=keys.read_flag("use_sliding_window", False))


def _refuse_o_proj_bias(keys: ConfigKeys) -> None:
    reason = "not supported: this family also adds a bias to o_proj, which megatron-core cannot do separately"
    keys.add_violation_unless("attention_bias", False, reason=reason)


def llama(keys: ConfigKeys) -> Architecture:
    """Return the architecture of Llama: grouped queries, no biases."""
    _refuse_o_proj_bias(keys)
    return Architecture("llama", **_read_decoder(keys, num_key_value_heads=None))


def mistral(keys: ConfigKeys) -> Architecture:
    """Return the architecture of Mistral without its window."""
    _refuse_short_window(keys)
    return Architecture("mistral", **_read_decoder(keys))


def mixtral(keys: ConfigKeys) -> Architecture:
    """Return the architecture of Mixtral: every layer has experts of the feed-forward's width."""
    _refuse_short_window(keys)
    keys.add_violation_unless(
        "router_jitter_noise", 0.0, 0, reason="noise on the router's input is not supported"
    )
    rotary = _build_rotary_fields(read_rope(keys, default_base=1e6))
    base = _read_decoder(keys, norm_epsilon=keys.read_number("rms_norm_eps", 1e-5, most=1.0), **rotary)
    moe = MoE(
        num_experts=keys.read_integer("num_local_experts", most=MOST_EXPERTS),
        topk=keys.read_integer("num_experts_per_tok"),
        ffn_hidden_size=base["ffn_hidden_size"],
        shared_ffn_hidden_size=0,
        layer_pattern=(1,) * base["num_layers"],
        **_read_switched_aux_loss(keys),
    )
    return Architecture("mixtral", **base, moe=moe)


def qwen2(keys: ConfigKeys, rope: Rope | None = None) -> Architecture:
    """Return the architecture of Qwen2 and 2.5: biases on queries, keys and values."""
    _refuse_active_short_window(keys)
    return Architecture(
        "qwen2", **_read_decoder(keys, qkv_bias=True, **_build_rotary_fields(rope or read_rope(keys)))
    )


def mimo(keys: ConfigKeys) -> Architecture:
    """Return the architecture of MiMo: Qwen2 with multi-token prediction."""
    _refuse_active_short_window(keys)
    keys.add_violation_unless("attention_bias", True, reason="MiMo's queries, keys and values have a bias")
    return Architecture("mimo", **_read_decoder(keys, qkv_bias=True, mtp_layers=_read_mtp_layers(keys)))


def qwen3(keys: ConfigKeys, rope: Rope | None = None) -> Architecture:
    """Return the architecture of Qwen3: norms on queries and keys."""
    _refuse_active_short_window(keys)
    _refuse_o_proj_bias(keys)
    rotary = _build_rotary_fields(rope or read_rope(keys))
    return Architecture("qwen3", **_read_decoder(keys, head_dim=REQUIRED, qk_layernorm=True, **rotary))


def qwen3_moe(keys: ConfigKeys, rope: Rope | None = None, *, norm_topk_prob: Any = REQUIRED) -> Architecture:
    """Return the architecture of Qwen3-MoE.

    Layers have experts unless decoder_sparse_step or mlp_only_layers leaves them out.
    """
    _refuse_active_short_window(keys)
    _refuse_o_proj_bias(keys)
    base = _read_decoder(keys, qk_layernorm=True, **_build_rotary_fields(rope or read_rope(keys)))
    # transformers 5 writes num_local_experts for what the published configs call num_experts.
    name = "num_local_experts" if keys.has_value("num_local_experts") else "num_experts"
    moe = _read_sparse_moe(
        keys,
        base["num_layers"],
        number=name,
        pre_softmax=not keys.read_flag("norm_topk_prob", norm_topk_prob),
    )
    return Architecture("qwen3_moe", **base, moe=moe)


def _read_sparse_moe(keys: ConfigKeys, layers: int, **routing: Any) -> MoE:
    """Return the experts of the layers that decoder_sparse_step and mlp_only_layers do not leave out."""
    step = keys.read_integer("decoder_sparse_step", 1)
    dense = set(keys.read_integer_list_or_empty("mlp_only_layers"))
    return _read_moe(
        keys, tuple(int(i not in dense and (i + 1) % step == 0) for i in range(layers)), **routing
    )


def _read_moe(keys: ConfigKeys, pattern: tuple[int, ...], number: str = "num_experts", **routing: Any) -> MoE:
    return MoE(
        num_experts=keys.read_integer(number, most=MOST_EXPERTS),
        topk=keys.read_integer("num_experts_per_tok"),
        ffn_hidden_size=keys.read_integer("moe_intermediate_size"),
        layer_pattern=pattern,
        **{"shared_ffn_hidden_size": 0, **_read_switched_aux_loss(keys), **routing},
    )


def qwen3_next(keys: ConfigKeys) -> Architecture:
    """Return the architecture of Qwen3-Next.

    Three of four layers have gated delta nets, the others gated attention. There are routed experts and a
    shared one.
    """
    _refuse_active_short_window(keys)
    base = _read_hybrid_decoder(keys)
    moe = _read_sparse_moe(
        keys,
        base["num_layers"],
        pre_softmax=not keys.read_flag("norm_topk_prob", True),
        shared_ffn_hidden_size=keys.read_integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return Architecture("qwen3_next", **base, moe=moe)


def qwen3_5_text(keys: ConfigKeys) -> Architecture:
    """Return the decoder of Qwen3.5: that of Qwen3-Next without experts."""
    _check_qwen3_5_fixed_values(keys)
    return Architecture("qwen3_5_text", **_read_hybrid_decoder(keys, rope=_read_rope_dropping_sections(keys)))


def qwen3_5_moe_text(keys: ConfigKeys) -> Architecture:
    """Return the decoder of Qwen3.5-MoE: experts in every layer, whose weights for a token sum to one."""
    _check_qwen3_5_fixed_values(keys)
    shared = keys.read_integer("shared_expert_intermediate_size")
    base = _read_hybrid_decoder(
        keys, rope=_read_rope_dropping_sections(keys), ffn_hidden_size=shared
    )  # no layer is dense
    pattern = (1,) * base["num_layers"]
    moe = _read_moe(keys, pattern, shared_ffn_hidden_size=shared, shared_gate=True)
    return Architecture("qwen3_5_moe_text", **base, moe=moe)


def _check_qwen3_5_fixed_values(keys: ConfigKeys) -> None:
    """Refuse other values of keys in Qwen3.5's configs that transformers' class does not read.

    Keys that matter only for serving are ignored.
    """
    keys.add_violation_unless("attn_output_gate", True, reason="this family's attention has a gate")
    keys.add_violation_unless("output_gate_type", "swish", reason="the nets' gate is a swish")
    keys.add_violation_unless(
        "mlp_only_layers", [], reason="all feed-forward layers of this family are alike"
    )
    for serving_key in ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        keys.read_value(serving_key)


def _read_rope_dropping_sections(keys: ConfigKeys) -> Rope:
    """Return positions in time, height and width, which are one number where there are no images."""
    rope_mapping = keys.read_mapping_or_empty("rope_parameters") or keys.read_mapping_or_empty("rope_scaling")
    rope = read_rope(
        keys, default_fraction=0.25, multimodal="mrope_section" in rope_mapping, interleaved=True
    )
    return rope._replace(sections=(), interleaved=False)


def _read_hybrid_decoder(keys: ConfigKeys, rope: Rope | None = None, **overrides: Any) -> dict[str, Any]:
    """Return the arguments of the decoder of Qwen3-Next and Qwen3.5."""
    _refuse_o_proj_bias(keys)
    rotary = _build_rotary_fields(rope or read_rope(keys, default_fraction=0.25))
    base = _read_decoder(
        keys,
        head_dim=256,
        has_mixed_layers=True,
        qk_layernorm=True,
        output_gate=True,
        zero_centered_norms=True,
        **rotary,
        **overrides,
    )
    net = DeltaNet(
        num_key_heads=keys.read_integer("linear_num_key_heads", 16),
        num_value_heads=keys.read_integer("linear_num_value_heads", 32),
        key_head_dim=keys.read_integer("linear_key_head_dim", 128),
        value_head_dim=keys.read_integer("linear_value_head_dim", 128),
        convolution=keys.read_integer("linear_conv_kernel_dim", 4),
        layers=_read_delta_net_flags(keys, base["num_layers"]),
    )
    return base | {"delta_net": net if any(net.layers) else None}


def _read_delta_net_flags(keys: ConfigKeys, layers: int) -> tuple[int, ...]:
    """Return 1 for each layer with a gated delta net; by default for all but every fourth."""
    interval, kinds = keys.read_integer("full_attention_interval", 4), keys.read_value("layer_types")
    if kinds is None:
        return tuple(int((number + 1) % interval != 0) for number in range(layers))
    if not isinstance(kinds, list) or any(kind not in (FULL, LINEAR) for kind in kinds):
        keys.add_violation("layer_types", kinds, f"must be a list of {FULL} and {LINEAR}")
    elif len(kinds) != layers:
        keys.add_violation(
            "layer_types", kinds, f"length {len(kinds)} differs from num_hidden_layers {layers}"
        )
    else:
        return tuple(int(kind == LINEAR) for kind in kinds)
    return (0,) * layers


def deepseek_v2(keys: ConfigKeys) -> Architecture:
    """Return the architecture of DeepSeek-V2: MLA, shared experts, and a softmax over all experts.

    The 236B model chooses experts from the best groups only.
    """
    keys.add_violation_unless("scoring_func", "softmax", reason="DeepSeek-V2 uses softmax scores")
    keys.add_violation_unless(
        "norm_topk_prob", False, reason="megatron-core does not renormalise after a softmax over all experts"
    )
    keys.add_violation_unless(
        "topk_method", "greedy", "group_limited_greedy", reason="DeepSeek-V2 has no other method"
    )
    if keys.read_value("topk_method") == "group_limited_greedy":
        groups = _read_expert_groups(keys, score_topk=1)
    else:
        groups = {}
        for unused_key in ("n_group", "topk_group"):
            keys.read_optional_integer(unused_key)
    return Architecture(
        "deepseek_v2", **_read_latent_decoder(keys, score_function="softmax", pre_softmax=True, **groups)
    )


def deepseek_v3(keys: ConfigKeys) -> Architecture:
    """Return the architecture of DeepSeek-V3.

    It has MLA, sigmoid scores with a steering bias, groups of experts and multi-token prediction.
    """
    return Architecture(
        "deepseek_v3",
        **_read_latent_decoder(keys, **_read_sigmoid_routing(keys)),
        mtp_layers=_read_mtp_layers(keys),
    )


def kimi_k2(keys: ConfigKeys) -> Architecture:
    """Return the architecture of Kimi-K2: DeepSeek-V3 under its own name."""
    return replace(deepseek_v3(keys), model_type="kimi_k2")


def glm4_moe(keys: ConfigKeys) -> Architecture:
    """Return the architecture of GLM-4.5.

    It has DeepSeek-V3's experts and multi-token prediction, and partly rotated grouped queries.
    """
    base = _read_decoder(
        keys,
        norm_epsilon=keys.read_number("rms_norm_eps", 1e-5, most=1.0),
        qkv_bias=keys.read_flag("attention_bias", False),
        qk_layernorm=keys.read_flag("use_qk_norm", False),
        mtp_layers=_read_mtp_layers(keys),
        **_build_rotary_fields(read_rope(keys, default_fraction=0.5)),
    )
    return Architecture(
        "glm4_moe",
        **base,
        moe=_read_deepseek_moe(keys, base["num_layers"], **_read_sigmoid_routing(keys)),
    )


def gpt_oss(keys: ConfigKeys) -> Architecture:
    """Return the architecture of gpt-oss.

    It has sinks, windows in every other layer, biases everywhere, and experts with a clamped gate.
    """
    keys.add_violation_unless(
        "attention_bias", True, reason="must be true: gpt-oss has biases on queries, keys, values and outputs"
    )
    keys.add_violation_unless("swiglu_alpha", 1.702, reason="megatron-core's gate has 1.702 only")
    if not (keys.has_value("rope_parameters") or keys.has_value("rope_scaling")):
        keys.add_violation("rope_scaling", None, "without it, transformers uses gpt-oss-20b's")
    rotary = _build_rotary_fields(read_rope(keys, default_base=150000.0))
    base = _read_decoder(
        keys,
        head_dim=64,
        has_mixed_layers=True,
        norm_epsilon=keys.read_number("rms_norm_eps", 1e-5, most=1.0),
        linear_bias=True,
        gate_limit=keys.read_number("swiglu_limit", 7.0, least=1e-3),
        sinks=True,
        qkv_bias=True,
        **rotary,
    )
    topk, scaling = keys.read_integer("num_experts_per_tok"), base["rope_scaling"]
    # What its makers' own code calls two of these.
    keys.add_violation_unless(
        "experts_per_token", None, topk, reason=f"differs from num_experts_per_tok {topk}"
    )
    original = scaling.original_max_position_embeddings if scaling else None
    keys.add_violation_unless(
        "initial_context_length", None, original, reason=f"differs from the rotary parameters, {original}"
    )
    moe = MoE(
        num_experts=keys.read_integer("num_local_experts", most=MOST_EXPERTS),
        topk=topk,
        ffn_hidden_size=base["ffn_hidden_size"],
        shared_ffn_hidden_size=0,
        layer_pattern=(1,) * base["num_layers"],
        **_read_switched_aux_loss(keys),
    )
    return Architecture("gpt_oss", **base, **_read_windows(keys, base["num_layers"]), moe=moe)


def _read_windows(keys: ConfigKeys, layers: int) -> dict[str, Any]:
    """Return the length of the window and the layers with one; by default every other, from the first."""
    kinds = keys.read_value("layer_types")
    if kinds is None:
        kinds = [FULL if number % 2 else SLIDING for number in range(layers)]
    if not isinstance(kinds, list) or any(kind not in (FULL, SLIDING) for kind in kinds):
        keys.add_violation("layer_types", kinds, f"must be a list of {FULL} and {SLIDING}")
        return {}
    if len(kinds) != layers:
        keys.add_violation(
            "layer_types", kinds, f"length {len(kinds)} differs from num_hidden_layers {layers}"
        )
    window = keys.read_optional_integer("sliding_window", 128)
    if window is None or SLIDING not in kinds:
        return {}
    return {"window": window, "windows": tuple(int(kind == SLIDING) for kind in kinds)}


def _read_latent_decoder(keys: ConfigKeys, **routing: Any) -> dict[str, Any]:
    """Return the arguments of DeepSeek's decoder: latent attention, and experts behind dense layers."""
    mla = MLA(
        q_lora_rank=keys.read_optional_integer("q_lora_rank", REQUIRED),
        kv_lora_rank=keys.read_integer("kv_lora_rank"),
        qk_head_dim=keys.read_integer("qk_nope_head_dim"),
        qk_pos_emb_head_dim=keys.read_integer("qk_rope_head_dim"),
        v_head_dim=keys.read_integer("v_head_dim"),
    )
    heads = keys.read_integer("num_attention_heads")
    keys.add_violation_unless("attention_bias", False, reason="biases in latent attention are not supported")
    keys.add_violation_unless(
        "rope_interleave", True, reason="megatron-core's latent attention rotates interleaved pairs"
    )
    keys.add_violation_unless(
        "num_key_value_heads", None, heads, reason=f"latent attention has {heads}, one per head"
    )
    # transformers 5 writes what follows from the numbers above.
    keys.add_violation_unless(
        "qk_head_dim", None, mla.q_head_dim, reason="must be qk_nope_head_dim + qk_rope_head_dim"
    )
    keys.add_violation_unless("head_dim", None, mla.qk_pos_emb_head_dim, reason="must be qk_rope_head_dim")
    base = _read_decoder(
        keys, num_key_value_heads=None, kv_channels=mla.v_head_dim, qk_layernorm=True, mla=mla
    )
    return base | {"moe": _read_deepseek_moe(keys, base["num_layers"], **routing)}


def _read_deepseek_moe(keys: ConfigKeys, layers: int, **routing: Any) -> MoE:
    width = keys.read_integer("moe_intermediate_size")
    first = keys.read_integer("first_k_dense_replace", least=0)
    frequency = keys.read_integer("moe_layer_freq", 1)
    shared = keys.read_integer("n_shared_experts", least=0) if keys.has_value("n_shared_experts") else 0
    return MoE(
        num_experts=keys.read_integer("n_routed_experts", most=MOST_EXPERTS),
        topk=keys.read_integer("num_experts_per_tok"),
        ffn_hidden_size=width,
        shared_ffn_hidden_size=width * shared,
        layer_pattern=tuple(int(i >= first and i % frequency == 0) for i in range(layers)),
        scaling_factor=keys.read_number("routed_scaling_factor"),
        aux_loss_coeff=keys.read_number("aux_loss_alpha", 0.0),
        aux_loss_per_sequence=keys.read_flag("seq_aux", False),
        **routing,
    )


def _read_sigmoid_routing(keys: ConfigKeys) -> dict[str, Any]:
    """Return the arguments of routing by sigmoid scores with a steering bias.

    Where there is more than one group of experts, they include the choice of the best groups.
    """
    keys.add_violation_unless("scoring_func", "sigmoid", reason="this family uses sigmoid scores")
    keys.add_violation_unless("topk_method", "noaux_tc", reason="this family uses noaux_tc")
    keys.add_violation_unless(
        "norm_topk_prob", True, reason="megatron-core always normalises sigmoid scores of several experts"
    )
    if keys.read_integer("num_experts_per_tok") == 1:
        keys.add_violation(
            "num_experts_per_tok", 1, "megatron-core does not normalise the score of a single expert"
        )
    return {"score_function": "sigmoid", "expert_bias": True} | _read_expert_groups(keys, score_topk=2)


def _read_expert_groups(keys: ConfigKeys, score_topk: int) -> dict[str, int]:
    """Return the arguments of choosing experts from the best groups; empty where there is one group."""
    groups, group_topk = keys.read_integer("n_group"), keys.read_integer("topk_group")
    return {"groups": groups, "group_topk": group_topk, "group_score_topk": score_topk} if groups > 1 else {}


def _read_switched_aux_loss(keys: ConfigKeys) -> dict[str, Any]:
    """Return the balancing loss as in transformers: its coefficient counts only with output_router_logits.

    Published configs name a coefficient and leave that false. DeepSeek's own code has no such switch.
    """
    coefficient = keys.read_number("router_aux_loss_coef", 0.0)
    is_enabled = keys.read_flag("output_router_logits", False)
    return {"aux_loss_coeff" if is_enabled else "unused_aux_loss_coeff": coefficient}


def _read_mtp_layers(keys: ConfigKeys) -> int:
    return keys.read_integer("num_nextn_predict_layers", 0, least=0, most=64)


FAMILIES: dict[str, Callable[[ConfigKeys], Architecture]] = {
    reader.__name__: reader
    for reader in (
        llama, mistral, mixtral, qwen2, mimo, qwen3, qwen3_moe, deepseek_v2, deepseek_v3, kimi_k2, glm4_moe,
        gpt_oss, qwen3_next, qwen3_5_text, qwen3_5_moe_text,
    )
}  # fmt: skip
