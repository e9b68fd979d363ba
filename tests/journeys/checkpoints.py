"""Tiny checkpoints as a Hub directory has them, with tokenizer and chat template, and rows for them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.data.chat import directory
from tests.vision import rows as images

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_SIZES = {
    "vocab_size": 270,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", **_SIZES, "head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": {"model_type": "qwen3_moe", **_SIZES, **_EXPERTS, "head_dim": 16, "num_experts": 4},
    "llama": {"model_type": "llama", **_SIZES},
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **_SIZES,
        **_EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_nextn_predict_layers": 1,
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            **_SIZES,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 3, 3],
            },
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 64,
            "out_hidden_size": 64,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        "vision_start_token_id": 258,
        "image_token_id": 259,
        "vision_end_token_id": 260,
        "video_token_id": 261,
    },
}


def write_checkpoint(name: str, place: Path) -> Path:
    """Write a checkpoint of random weights with its tokenizer, as its family publishes it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(**json.loads(json.dumps(CONFIGS[name])))
    seeing = "vision_config" in CONFIGS[name]
    kind = transformers.AutoModelForImageTextToText if seeing else transformers.AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32)
    model.save_pretrained(place)
    if seeing:
        images.digits.write_tokenizer(place)
    else:
        directory(place, TEMPLATE)
    if CONFIGS[name].get("num_nextn_predict_layers"):
        _add_prediction_layer(place / "model.safetensors", config.num_hidden_layers)
    return place


def _add_prediction_layer(file: Path, layers: int) -> None:
    """Add an MTP layer, which transformers does not write: a copy of the last layer and its own parts."""
    tensors = load_file(file)
    last, own = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    added = {
        own + name.removeprefix(last): value.clone()
        for name, value in tensors.items()
        if name.startswith(last)
    }
    hidden = tensors["model.norm.weight"]
    added |= {f"{own}{norm}.weight": hidden.clone() for norm in ("enorm", "hnorm", "shared_head.norm")}
    added[f"{own}eh_proj.weight"] = 0.02 * torch.randn(len(hidden), 2 * len(hidden))
    added[f"{own}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    added[f"{own}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors | added, file, metadata={"format": "pt"})


def write_lines(file: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as JSONL."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def chats(count: int) -> list[dict[str, Any]]:
    """Return conversations of one turn with answers of several lengths."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"Count to {number}."},
                {"role": "assistant", "content": ", ".join(map(str, range(1, number + 1)))},
            ]
        }
        for number in range(1, count + 1)
    ]


def pairs(count: int) -> list[dict[str, Any]]:
    """Return preferences between two answers."""
    return [
        {"prompt": f"Is {number} even?", "chosen": "yes" if number % 2 == 0 else "no", "rejected": "perhaps"}
        for number in range(count)
    ]


def seen_chats(count: int, place: Path) -> list[dict[str, Any]]:
    """Return conversations about images, which are written into a folder beside the rows."""
    (place / "images").mkdir()
    rows = []
    for number in range(count):
        name = f"images/{number}.png"
        (place / name).write_bytes(images.content(images.image(16, 16, seed=number)))
        rows.append(images.asking("<image>which one?", str(number), images=[name]))
    return rows
