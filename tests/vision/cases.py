"""Tiny models that see images, with unusual numbers, in the words of transformers 4 and of 5."""

from dataclasses import dataclass
from typing import Any

from bundle.architectures import VisionArchitecture, from_config

_TEXT = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 203,  # 53 of the 256 columns are padding
    "max_position_embeddings": 128,
    "rms_norm_eps": 3e-3,
}
_TOWER = {
    "depth": 3,
    "hidden_size": 24,
    "num_heads": 2,
    "intermediate_size": 44,
    "out_hidden_size": 48,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "tokens_per_second": 3,
    "hidden_act": "silu",
}
IMAGE, VIDEO, START, END = 190, 191, 192, 193
_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_SECTIONS = {"mrope_section": [2, 3, 1]}


_DEEP = {
    "depth": 4,
    "hidden_size": 24,
    "num_heads": 2,
    "intermediate_size": 44,
    "out_hidden_size": 48,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
    "hidden_act": "gelu_pytorch_tanh",
}


@dataclass(frozen=True)
class Case:
    """A Hugging Face config."""

    name: str
    config: dict[str, Any]

    @property
    def family(self) -> str:
        """The model_type."""
        found: str = self.config["model_type"]
        return found

    @property
    def vision(self) -> VisionArchitecture:
        """The tower."""
        found = from_config(self.config).vision
        assert found is not None
        return found


_OLD = {"rope_theta": 700.0, "rope_scaling": {"type": "mrope", **_SECTIONS}}
_NEW = {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0, **_SECTIONS}}
_INTERLEAVED = {
    "rope_theta": 700.0,
    "rope_scaling": {"rope_type": "default", "mrope_section": [3, 3, 2], "mrope_interleaved": True},
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

CASES = (
    Case(
        "qwen2_5_vl as on the Hub",
        {"model_type": "qwen2_5_vl", **_TEXT, **_OLD, "vision_config": _TOWER | {"in_chans": 3}, **_TOKENS},
    ),
    Case(
        "qwen2_5_vl tied, another tower",
        {
            "model_type": "qwen2_5_vl",
            "text_config": {"model_type": "qwen2_5_vl_text", **_TEXT, **_NEW},
            "vision_config": _TOWER
            | {"fullatt_block_indexes": [0, 2], "window_size": 8, "temporal_patch_size": 1, "patch_size": 2}
            | {"in_channels": 3},
            "tie_word_embeddings": True,
            **_TOKENS,
        },
    ),
    Case(
        "qwen2_5_vl stretched",
        {
            "model_type": "qwen2_5_vl",
            "text_config": {
                "model_type": "qwen2_5_vl_text",
                **_TEXT,
                "rope_parameters": {**_YARN, "rope_theta": 700.0, **_SECTIONS},
            },
            "vision_config": _TOWER,
            **_TOKENS,
        },
    ),
    Case(
        "qwen3_vl as on the Hub",
        {
            "model_type": "qwen3_vl",
            "text_config": {
                "model_type": "qwen3_vl_text",
                **_TEXT,
                **_INTERLEAVED,
                "num_hidden_layers": 4,
                "head_dim": 16,
            },
            "vision_config": {"model_type": "qwen3_vl", **_DEEP},
            **_TOKENS,
        },
    ),
    Case(
        "qwen3_vl tied, another tower",
        {
            "model_type": "qwen3_vl",
            "text_config": {
                "model_type": "qwen3_vl_text",
                **_TEXT,
                "num_hidden_layers": 4,
                "head_dim": 12,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 300.0,
                    "mrope_section": [2, 2, 2],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": _DEEP
            | {"deepstack_visual_indexes": [3], "num_position_embeddings": 9}
            | {"temporal_patch_size": 1, "patch_size": 2},
            "tie_word_embeddings": True,
            **_TOKENS,
        },
    ),
    Case(
        "qwen3_vl_moe as on the Hub",
        {
            "model_type": "qwen3_vl_moe",
            "text_config": {
                "model_type": "qwen3_vl_moe_text",
                **_TEXT,
                **_INTERLEAVED,
                "num_hidden_layers": 4,
                "head_dim": 16,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 20,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [2],
                "router_aux_loss_coef": 0.002,
            },
            "vision_config": {"model_type": "qwen3_vl_moe", **_DEEP},
            "tie_word_embeddings": False,
            **_TOKENS,
        },
    ),
    Case(
        "qwen3_vl_moe tied, some layers dense",
        {
            "model_type": "qwen3_vl_moe",
            "text_config": {
                "model_type": "qwen3_vl_moe_text",
                **_TEXT,
                "num_hidden_layers": 4,
                "head_dim": 12,
                "num_local_experts": 6,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 36,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [1],
                "router_aux_loss_coef": 0.003,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 300.0,
                    "mrope_section": [2, 2, 2],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": _DEEP | {"deepstack_visual_indexes": [3, 1], "temporal_patch_size": 1},
            "tie_word_embeddings": True,
            **_TOKENS,
        },
    ),
)
