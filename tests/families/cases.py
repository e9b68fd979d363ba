"""A tiny model of every family with unusual numbers, every kind of rotary stretching in both spellings."""

from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from bundle.environment.packages import MegatronCode
from bundle.planning.problems import find_missing_feature

LENGTH = 48  # tokens to predict: beyond the original length of every stretching below
ORIGINAL = 16

_SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 203,  # 53 of the 256 columns are padding
    "max_position_embeddings": 64,
    "rms_norm_eps": 3e-3,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
_QWEN3_MOE = _SIZES | _EXPERTS | {"num_experts": 8, "head_dim": 16, "norm_topk_prob": True}
_SHARED = _EXPERTS | {"n_routed_experts": 8, "n_shared_experts": 2, "routed_scaling_factor": 1.7}
_GLM = _SIZES | _SHARED | {"head_dim": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = _SIZES | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_V2 = _LATENT | _SHARED | {"q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False}
_V3 = _LATENT | _SHARED | {"q_lora_rank": 24, "norm_topk_prob": True}

# So many experts of so few groups that megatron-core would rank these by more of their experts.
_GROUPS: dict[str, Any] = {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 3}

_ODD_WINDOWS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 5.0,
    "low_freq_factor": 0.3,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": ORIGINAL,
}
_LINEAR = {"rope_type": "linear", "factor": 3.0}

_GPT_OSS = _SIZES | {
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "head_dim": 16,
    "sliding_window": 7,
    "swiglu_limit": 0.8,  # which values reach
    "num_hidden_layers": 4,
}

_LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "head_dim": 16,
    "num_hidden_layers": 4,
}
_QWEN3_NEXT = _QWEN3_MOE | _LINEAR_ATTENTION
_QWEN3_NEXT |= {"num_experts_per_tok": 3, "shared_expert_intermediate_size": 36}
_QWEN3_5 = _SIZES | _LINEAR_ATTENTION | {"full_attention_interval": 2}
_QWEN3_5_MOE = _QWEN3_NEXT | {"full_attention_interval": 2}
del _QWEN3_5_MOE["intermediate_size"], _QWEN3_5_MOE["norm_topk_prob"]
_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 0], "mrope_interleaved": True}
_BESIDE: dict[str, Any] = {"rope_theta": 700.0, "partial_rotary_factor": 0.75}
_ODD_LINEAR = ["full_attention", "linear_attention", "linear_attention", "full_attention"]


@dataclass(frozen=True)
class Case:
    """A Hugging Face config; `model_type` is that of transformers' class."""

    name: str
    config: dict[str, Any]
    ours: str = ""  # our family's name, where transformers has no class of it

    @property
    def parallel(self) -> dict[str, Any]:
        """What every layout of this model says: experts with biases are never cut."""
        return {"etp": 1} if self.family == "gpt_oss" else {}

    @property
    def linear(self) -> bool:
        """Whether some of its layers are gated delta nets."""
        return "linear_num_key_heads" in self.config

    @property
    def family(self) -> str:
        """The model_type that we read."""
        return self.ours or self.config["model_type"]


def _case(model_type: str, sizes: dict, name: str = "plain", ours: str = "", **more: Any) -> Case:
    family = ours or model_type
    return Case(f"{family} {name}", {"model_type": model_type, **sizes, **more}, ours)


def _old(scaling: dict, theta: float = 700.0) -> dict[str, Any]:
    """As transformers 4 writes it."""
    return {"rope_theta": theta, "rope_scaling": scaling}


def _new(scaling: dict, theta: float = 700.0) -> dict[str, Any]:
    """As transformers 5 writes it."""
    return {"rope_parameters": {"rope_theta": theta, **scaling}}


CASES = (
    _case("llama", _SIZES, "llama3", **_old(_LLAMA3)),
    _case("llama", _SIZES, "yarn", **_new(_YARN)),
    _case("mistral", _SIZES, "linear", **_old(_LINEAR), sliding_window=None),
    _case("mistral", _SIZES, "yarn of whole pairs", **_old(_YARN | {"truncate": True}), sliding_window=None),
    _case("qwen2", _SIZES, "yarn with a factor", **_old(_YARN | {"attention_factor": 1.6})),
    _case("qwen2", _SIZES, "tied", tie_word_embeddings=True),
    _case("qwen2", _SIZES, "yarn", "mimo", **_new(_YARN | {"beta_fast": 5, "beta_slow": 0.5})),
    _case("qwen3", _SIZES, "yarn", **_old(_YARN), head_dim=16),
    _case("qwen3", _SIZES, "yarn not truncated", **_new(_YARN | {"truncate": False}), head_dim=16),
    _case("qwen3_moe", _QWEN3_MOE, "mscale", **_old(_YARN | {"mscale": 1.4, "mscale_all_dim": 0.3})),
    _case("mixtral", _SIZES, "linear", **_new(_LINEAR), num_experts_per_tok=2, num_local_experts=4),
    _case("mixtral", _SIZES, "its own theta", num_experts_per_tok=2, num_local_experts=4),
    _case("glm4_moe", _GLM, "yarn", **_old(_YARN), use_qk_norm=True, attention_bias=True),
    _case("glm4_moe", _GLM, "llama3", **_old(_LLAMA3), partial_rotary_factor=0.25),
    _case("deepseek_v2", _V2, "yarn", **_old(_YARN | {"mscale": 0.707, "mscale_all_dim": 1.9})),
    _case("deepseek_v2", _V2, "linear", **_old(_LINEAR)),
    _case("deepseek_v2", _V2, "groups", **_GROUPS, topk_method="group_limited_greedy"),
    _case("deepseek_v3", _V3, "groups", "kimi_k2", **_GROUPS),
    _case("deepseek_v3", _V3, "plain"),
    _case("deepseek_v3", _V3, "yarn as published", **_old(_YARN | {"mscale": 1, "mscale_all_dim": 1})),
    _case("deepseek_v3", _V3, "yarn without mscale", **_new(_YARN)),
    _case("deepseek_v3", _V3, "yarn with one mscale", **_old(_YARN | {"mscale_all_dim": 0.8})),
    _case("deepseek_v3", _V3, "llama3", **_new(_LLAMA3)),
    _case("gpt_oss", _GPT_OSS, "of other windows", **_new(_YARN), layer_types=_ODD_WINDOWS),
    _case("gpt_oss", _GPT_OSS, "as published", **_old(_YARN | {"truncate": False})),
    _case(
        "qwen3_next", _QWEN3_NEXT, "in other layers", **_new(_YARN), layer_types=_ODD_LINEAR,
        tie_word_embeddings=True, mlp_only_layers=[1], decoder_sparse_step=2,
    ),
    _case(
        "qwen3_next", _QWEN3_NEXT, "as published", **_BESIDE, norm_topk_prob=False, full_attention_interval=3
    ),
    _case("qwen3_5_text", _QWEN3_5, "as published", **_new(_MROPE | {"partial_rotary_factor": 0.25})),
    _case(
        "qwen3_5_text", _QWEN3_5, "tied", **_old(_YARN), partial_rotary_factor=0.75, layer_types=_ODD_LINEAR,
        tie_word_embeddings=True,
    ),
    _case(
        "qwen3_5_moe_text", _QWEN3_5_MOE, "in other words", **_BESIDE, layer_types=_ODD_LINEAR,
        tie_word_embeddings=True,
    ),
    _case("qwen3_5_moe_text", _QWEN3_5_MOE, "as published", **_new(_MROPE | {"partial_rotary_factor": 0.25})),
)  # fmt: skip


def of_release(release: str) -> tuple[Case, ...]:
    """Those that this megatron-core computes."""
    code = MegatronCode(Version(release))
    return tuple(case for case in CASES if find_missing_feature(case.family, code) is None)
