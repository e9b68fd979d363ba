"""Tiny configs of families that differ in attention, experts or caches, and models of random weights."""

import copy
from typing import Any

import torch
from torch import Tensor

_SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.3,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mimo": {"model_type": "mimo", **_SIZES, "num_nextn_predict_layers": 1},
    "tied": {"model_type": "qwen2", **_SIZES, "tie_word_embeddings": True},
    "window": {"model_type": "mistral", **_SIZES, "sliding_window": 4, "head_dim": 8},
    "latent": {
        "model_type": "deepseek_v3",
        **_SIZES,
        **_EXPERTS,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
        "num_nextn_predict_layers": 1,
    },
    "glm": {"model_type": "glm4_moe", **_SIZES, **_EXPERTS, "head_dim": 8, "num_nextn_predict_layers": 1},
    "linear": {
        "model_type": "qwen3_next",
        **_SIZES,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 16,
        "norm_topk_prob": True,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "linear_conv_kernel_dim": 3,
    },
    "stacks": {
        "model_type": "gpt_oss",
        **_SIZES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "sliding_window": 5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
    },
}
_OF_TRANSFORMERS = {"mimo": "qwen2"}


def draw_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own class with random weights, by its own constructor."""
    from transformers import AutoConfig, AutoModelForCausalLM

    entries = copy.deepcopy(CONFIGS[name])
    kind = entries.pop("model_type")
    config = AutoConfig.for_model(_OF_TRANSFORMERS.get(kind, kind), **entries)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # torch has no grouped products of float64.
        how = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **how).eval().requires_grad_(False)
        for value in (*model.parameters(), *model.buffers()):
            if value.ndim < 3 and value.is_floating_point() and value.numel() and not is_rotary(model, value):
                value.copy_(torch.randn(value.shape) * 0.3 + (value.ndim == 1))
    return model


def is_rotary(model: Any, value: Tensor) -> bool:
    return any(value is buffer for name, buffer in model.named_buffers() if "inv_freq" in name)


def publish(model: Any, directory: Any) -> dict[str, Tensor]:
    """The published tensors of a model, as transformers itself saves them."""
    from safetensors.torch import load_file

    model.save_pretrained(directory)
    return {k: v for path in directory.glob("*.safetensors") for k, v in load_file(path).items()}
