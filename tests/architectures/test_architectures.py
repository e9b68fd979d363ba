"""Hugging Face configs read as published, and everything that must be refused."""

import json
from dataclasses import replace

import pytest

from bundle.architectures import MLA, Architecture, MoE, RopeScaling, from_config, read_config
from bundle.architectures.families import FAMILIES
from bundle.errors import UsageError

DENSE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
V3 = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"fmt": "e4m3", "quant_method": "fp8"},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


GPT_OSS = DENSE | {
    "model_type": "gpt_oss",
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "initial_context_length": 64,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
}


def violations(config: dict) -> tuple[str, ...]:
    with pytest.raises(UsageError) as caught:
        from_config(config)
    assert caught.value.code == 2
    return caught.value.violations


def test_deepseek_v3_as_published():
    assert from_config(V3) == Architecture(
        model_type="deepseek_v3",
        num_layers=61,
        hidden_size=7168,
        ffn_hidden_size=18432,
        num_attention_heads=128,
        num_query_groups=128,
        kv_channels=128,
        vocab_size=129280,
        max_position_embeddings=163840,
        qk_layernorm=True,
        rope_scaling=RopeScaling("yarn", 40.0, 4096, softmax_mscale=1.0),
        mla=MLA(1536, 512, 128, 64, 128),
        moe=MoE(
            num_experts=256,
            topk=8,
            ffn_hidden_size=2048,
            shared_ffn_hidden_size=2048,
            layer_pattern=(0,) * 3 + (1,) * 58,
            score_function="sigmoid",
            expert_bias=True,
            scaling_factor=2.5,
            groups=8,
            group_topk=4,
            aux_loss_coeff=0.001,
            aux_loss_per_sequence=True,
        ),
        mtp_layers=1,
    )


def test_queries_may_be_uncompressed_and_head_dims_are_unequal():
    read = from_config(V3 | {"q_lora_rank": None})
    assert read.mla and read.mla.q_lora_rank is None
    assert read.head_dims == (192, 128)


def test_a_missing_q_lora_rank_is_not_a_null_one():
    config = {k: v for k, v in V3.items() if k != "q_lora_rank"}
    assert violations(config) == ("q_lora_rank: missing",)


@pytest.mark.parametrize(
    ("model_type", "bias", "norm"),
    [("llama", False, False), ("mistral", False, False), ("qwen2", True, False), ("qwen3", False, True)],
)
def test_dense_families_differ_in_bias_and_norms(model_type, bias, norm):
    read = from_config(DENSE | {"model_type": model_type, "rope_theta": 5e5})
    assert (read.qkv_bias, read.qk_layernorm, read.num_query_groups) == (bias, norm, 2)
    assert (read.rotary_base, read.mtp_layers, read.moe, read.moe_layer_pattern) == (5e5, 0, None, (0, 0))


def test_mimo_is_qwen2_with_mtp():
    config = {"num_nextn_predict_layers": 1, "attention_bias": True, "use_mrope": False}
    read = from_config(DENSE | config | {"model_type": "mimo"})
    assert read == replace(from_config(DENSE | {"model_type": "qwen2"}), model_type="mimo", mtp_layers=1)


MOE = {"model_type": "qwen3_moe", "moe_intermediate_size": 32}


def test_qwen3_moe_pattern_and_both_spellings_of_experts():
    config = DENSE | {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 6,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    }
    read = from_config(config | {"num_experts": 8})
    assert read.moe_layer_pattern == (0, 1, 0, 0, 0, 1)
    assert read.moe and not read.moe.pre_softmax and read.moe.num_experts == 8
    assert from_config(config | {"num_local_experts": 8}) == read
    unnormalised = from_config(config | {"num_experts": 8, "norm_topk_prob": False})
    assert unnormalised.moe and unnormalised.moe.pre_softmax


@pytest.mark.parametrize("experts", [{"num_experts": 8, "norm_topk_prob": True}, {"num_local_experts": 8}])
def test_a_balancing_coefficient_counts_where_transformers_adds_the_loss(experts):
    config = DENSE | experts | {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}
    config |= {"model_type": "mixtral"} if len(experts) == 1 else MOE
    for asked in ({}, {"output_router_logits": False}):
        moe = from_config(config | asked).moe
        assert moe and (moe.aux_loss_coeff, moe.unused_aux_loss_coeff) == (0.0, 0.02)
    moe = from_config(config | {"output_router_logits": True}).moe
    assert moe and (moe.aux_loss_coeff, moe.unused_aux_loss_coeff) == (0.02, 0.0)


def test_glm_rotates_half_a_head():
    moe = {k: V3[k] for k in ("n_shared_experts", "routed_scaling_factor", "first_k_dense_replace")}
    config = DENSE | moe | {"model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 2}
    config |= {"moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "attention_bias": True}
    read = from_config(config | {"num_nextn_predict_layers": 1, "use_qk_norm": True})
    assert (read.rotary_fraction, read.qkv_bias, read.qk_layernorm, read.mtp_layers) == (0.5, True, True, 1)
    assert read.moe and read.moe.groups is None and read.moe.score_function == "sigmoid"


HYBRID = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}


def test_which_layers_of_qwen3_next_have_gated_delta_nets(messages):
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config = DENSE | MOE | experts | {"model_type": "qwen3_next", "num_hidden_layers": 6}
    config |= {"shared_expert_intermediate_size": 24}
    full, linear = "full_attention", "linear_attention"
    for said, layers in (
        ({}, (1, 1, 1, 0, 1, 1)),
        ({"full_attention_interval": 3}, (1, 1, 0, 1, 1, 0)),
        ({"layer_types": [full, linear, full, full, full, full]}, (0, 1, 0, 0, 0, 0)),
    ):
        read = from_config(config | said)
        assert read.delta_net and read.delta_net.layers == layers
        assert read.num_attention_layers == layers.count(0)
    assert read.moe and read.moe.shared_gate and read.moe.shared_ffn_hidden_size == 24
    assert (read.rotary_fraction, read.output_gate, read.zero_centered_norms) == (0.25, True, True)
    assert from_config(config | {"layer_types": [full] * 6}).delta_net is None
    for wrong in ({"layer_types": [linear] * 5}, {"layer_types": ["sliding_attention"] * 6}):
        assert "layer_types" in " ".join(violations(config | wrong))
    (said_of_experts,) = violations(config | {"num_local_experts": 4})  # which transformers does not read
    assert said_of_experts.startswith("num_local_experts: ")
    (said_of_heads,) = violations(config | {"linear_num_value_heads": 24})
    assert "value_heads 24" in said_of_heads
    messages(said_of_experts)
    messages(said_of_heads)


# Of the text sections that the Hub has of Qwen3.5 and 3.6: what transformers' class does not read.
BESIDE_QWEN3_5 = {
    "attn_output_gate": True,
    "output_gate_type": "swish",
    "full_attention_interval": 4,
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_what_published_configs_of_qwen3_5_say_besides(family):
    config = DENSE | {"model_type": family, "num_hidden_layers": 4}
    if "moe" in family:
        config |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        config |= {"shared_expert_intermediate_size": 24}
        del config["intermediate_size"]
    assert from_config(config | BESIDE_QWEN3_5) == from_config(config)
    assert from_config(config).rotary_fraction == 0.25
    for other in ({"attn_output_gate": False}, {"output_gate_type": "sigmoid"}, {"mlp_only_layers": [1]}):
        (said,) = violations(config | BESIDE_QWEN3_5 | other)
        assert said.startswith(next(iter(other)))


@pytest.mark.parametrize("model_type", [t for t in FAMILIES if t not in {"mimo", "kimi_k2"}])
def test_every_family_reads_what_transformers_writes(model_type):
    mapping = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    written = mapping[model_type]().to_dict() | {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}
    written |= {"head_dim": 64} if "deepseek" in model_type else {"head_dim": 128, "sliding_window": None}
    if model_type in {"llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt_oss"} | HYBRID:
        written = {k: v for k, v in written.items() if k not in {"n_group", "topk_group"}}
    if model_type in {"llama", "mistral", "qwen2", "qwen3", "qwen3_5_text"}:
        del written["num_experts_per_tok"]
    assert from_config(written).num_layers == written["num_hidden_layers"]


REFUSED = [
    ("qwen2", {"use_sliding_window": True, "sliding_window": 32}, "sliding_window"),
    ("mistral", {"sliding_window": 32}, "sliding_window"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("llama", {"attention_bias": True}, "o_proj"),
    ("llama", {"mlp_bias": True}, "mlp_bias"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("qwen2", {"use_mrope": True}, "use_mrope"),
    ("llama", {"embedding_multiplier": 12.0}, "unknown key"),
    ("llama", {"num_key_value_head": 2}, "did you mean num_key_value_heads"),
    ("llama", {"hidden_size": True}, "hidden_size"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ("llama", {"num_hidden_layers": 10**12}, "num_hidden_layers"),
    ("llama", {"head_dim": 15}, "not even"),
    ("llama", {"num_key_value_heads": 3}, "not a multiple of num_key_value_heads"),
]


@pytest.mark.parametrize(("model_type", "change", "named"), REFUSED)
def test_what_would_not_be_computed_is_refused_by_name(model_type, change, named):
    found = violations(DENSE | {"model_type": model_type} | change)
    assert len(found) == 1 and named in found[0]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        (
            {"n_group": 256, "topk_group": 8},
            "n_group 256: a group is scored by its best 2 experts, but has only 1",
        ),
        ({"n_group": 7}, "do not divide"),
        ({"n_group": 1, "n_routed_experts": 4}, "exceeds the 4 experts"),
        ({"num_experts_per_tok": 1, "n_group": 1}, "single expert"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
    ],
)
def test_routing_and_latent_attention_that_megatron_would_compute_otherwise(change, named):
    found = violations(V3 | change)
    assert len(found) == 1 and named in found[0]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"swiglu_alpha": 1.5}, "swiglu_alpha"),
        ({"attention_bias": False}, "attention_bias"),
        ({"layer_types": ["full_attention"]}, "length 1 differs from num_hidden_layers 2"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ({"experts_per_token": 3}, "differs from num_experts_per_tok 2"),
        ({"initial_context_length": 32}, "differs from the rotary parameters, 64"),
        ({"rope_scaling": None, "initial_context_length": None}, "transformers uses gpt-oss-20b's"),
    ],
)
def test_what_gpt_oss_would_compute_otherwise_is_refused(change, named):
    found = violations(GPT_OSS | change)
    assert len(found) == 1 and named in found[0]


def test_gpt_oss_has_windows_in_every_other_layer_where_nobody_says():
    read = from_config(GPT_OSS)
    assert (read.window, read.windows) == (128, (1, 0))
    assert from_config(GPT_OSS | {"sliding_window": None}).windows == ()


def test_the_window_that_never_cuts_and_the_inactive_one_are_fine():
    from_config(DENSE | {"model_type": "mistral", "sliding_window": 128})
    from_config(DENSE | {"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False})


def test_published_keys_without_effect_are_fine():
    noted = {"use_mrope": False, "unsloth_version": "2025.1", "_attn_implementation_autoset": True}
    generation = {"temperature": 0.7, "top_p": 0.8, "do_sample": True, "max_length": 20, "is_decoder": False}
    plain = from_config(DENSE | {"model_type": "qwen2"})
    assert from_config(DENSE | noted | generation | {"model_type": "qwen2"}) == plain


def test_latent_heads_need_not_divide_the_hidden_size():
    assert from_config(V3 | {"hidden_size": 7167}).kv_channels == 128


def test_all_violations_at_once():
    found = violations(V3 | {"hidden_act": "relu", "n_group": 7, "colour": 1, "qk_rope_head_dim": 63})
    assert len(found) == 4


def test_unknown_model_types_list_the_supported_ones(messages):
    with pytest.raises(UsageError, match="qwen3 or") as caught:
        from_config({"model_type": "qwen33"})
    assert "deepseek_v3" in caught.value.violations[0]
    messages(caught.value)
    with pytest.raises(UsageError, match="model_type") as caught:
        from_config({})
    messages(caught.value)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_models_of_gated_delta_nets_are_refused_with_the_reason(family):
    (said,) = violations({"model_type": family})
    assert said.startswith(f"model_type {family}: ") and "gated delta net" in said


def test_read_config_refuses_what_is_no_config(tmp_path):
    with pytest.raises(UsageError, match=r"config\.json"):
        read_config(tmp_path)
    for text in ("{", "[]", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UsageError):
            read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(V3))
    assert read_config(tmp_path) == V3
