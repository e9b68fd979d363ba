"""A small model of every family, or several, with unusual values in every field that the family reads."""

from typing import Any

Config = dict[str, Any]

_SIZES: Config = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden_size / heads
    "vocab_size": 100,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-2,
    "rope_theta": 500.0,
}
# Latent attention has keys and values for every head.
_LATENT: Config = {k: v for k, v in _SIZES.items() if k != "head_dim"} | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 10,
}
_EXPERTS: Config = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
_SIGMOID: Config = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True}
_GREEDY: Config = {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}

# What a config leaves out has the family's own default.
_BARE: Config = {k: v for k, v in _SIZES.items() if k not in ("rms_norm_eps", "rope_theta")}

CONFIGS: dict[str, Config] = {
    "llama": {"model_type": "llama", **_SIZES, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "llama3": {
        "model_type": "llama",
        **{k: v for k, v in _SIZES.items() if k != "rope_theta"},
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 3e3,
            "factor": 6.0,
            "low_freq_factor": 1.5,
            "high_freq_factor": 5.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {
        "model_type": "mistral",
        **_SIZES,
        "head_dim": None,
        "num_attention_heads": 6,
        "tie_word_embeddings": True,
    },
    "mixtral": {
        "model_type": "mixtral",
        **_SIZES,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "tie_word_embeddings": True,
    },
    "mixtral bare": {"model_type": "mixtral", **_BARE, "num_local_experts": 6, "num_experts_per_tok": 3},
    "glm4_moe bare": {"model_type": "glm4_moe", **_BARE, **_EXPERTS, **_SIGMOID},
    "qwen3 bare": {"model_type": "qwen3", **_BARE},
    "qwen2": {"model_type": "qwen2", **_SIZES},
    "qwen2 tied": {"model_type": "qwen2", **_SIZES, "tie_word_embeddings": True, "num_key_value_heads": 4},
    "qwen3": {
        "model_type": "qwen3",
        **_SIZES,
        "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 3.0,
            "beta_fast": 5.0,
            "beta_slow": 0.4,
            "attention_factor": 1.3,
            "truncate": False,
        },
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_SIZES,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
    "qwen3_moe raw": {
        "model_type": "qwen3_moe",
        **_SIZES,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": False,
        "mlp_only_layers": [0],
        "tie_word_embeddings": True,
    },
    "mimo": {"model_type": "mimo", **_SIZES, "num_nextn_predict_layers": 2, "tie_word_embeddings": True},
    "glm4_moe": {
        "model_type": "glm4_moe",
        **_SIZES,
        **_EXPERTS,
        **_SIGMOID,
        "partial_rotary_factor": 0.25,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 1,
    },
    "glm4_moe plain": {
        "model_type": "glm4_moe",
        **_SIZES,
        **_EXPERTS,
        **_SIGMOID,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 2,
        "moe_layer_freq": 2,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.75,
            "factor": 2.5,
        },
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        **_LATENT,
        **_EXPERTS,
        **_GREEDY,
        "q_lora_rank": 20,
        "moe_layer_freq": 2,
        "first_k_dense_replace": 0,
    },
    "deepseek_v2 lite": {
        "model_type": "deepseek_v2",
        **_LATENT,
        **_EXPERTS,
        **_GREEDY,
        "q_lora_rank": None,
        "tie_word_embeddings": True,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **_LATENT,
        **_EXPERTS,
        **_SIGMOID,
        "q_lora_rank": 20,
        "num_nextn_predict_layers": 2,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 24.0,
            "beta_slow": 1.2,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
        },
    },
    "deepseek_v3 flat": {
        "model_type": "deepseek_v3",
        **_LATENT,
        **_EXPERTS,
        **_SIGMOID,
        "q_lora_rank": None,
        "tie_word_embeddings": True,
        "moe_layer_freq": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 0,
        "num_experts_per_tok": 3,
    },
}
