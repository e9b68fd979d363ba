"""Recipes for planning tests: small models of every kind in any layout."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bundle.environment.machine import DetectedValue, Hardware
from bundle.patches import Decision
from bundle.patches.megatron_core import MegatronCore
from bundle.patches.plan import Survey
from bundle.planning import MegatronVersion, Plan, assemble_plan, to_text
from bundle.recipe import Recipe, from_mapping

_BASE = {
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
QWEN3 = _BASE | {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16}
QWEN3_NEXT = QWEN3 | {
    "model_type": "qwen3_next",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 32,
}
QWEN2_TIED = _BASE | {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True}
DEEPSEEK = _BASE | {
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}


def job(config: dict[str, Any], **sections: Any) -> Recipe:
    """The recipe of a model; the sections `parallel`, `model`, `train` ... are laid over small defaults."""
    defaults: dict[str, dict[str, Any]] = {
        "model": {"config": config, "dtype": "bf16"},
        "data": {"source": "text", "path": ["stdlib"], "sequence_length": 64},
        "train": {"steps": 10, "global_batch_size": 12},
    }
    merged = {name: values | sections.pop(name, {}) for name, values in defaults.items()}
    return from_mapping({"name": "job", **merged, **sections})


def plan(
    recipe: Recipe,
    on: Hardware,
    version: str = "0.16.1",
    decisions: Sequence[Decision] = (),
    **options: Any,
) -> Plan:
    """The plan for a megatron-core without a tree, about which just these decisions were made."""
    decided = Survey(MegatronCore(version, None, None, "a test", None), tuple(decisions))
    return assemble_plan(recipe, on, MegatronVersion(version, "a test"), decided, **options)


def read_section(made: Plan, name: str) -> str:
    """Return the lines of a section of the text of a plan; "" where the plan has no such section."""
    title, lines = "", []
    for line in to_text(made, "", "").splitlines():
        title = line[:12].strip() or title
        if title == name:
            lines.append(line[13:])
    return "\n".join(lines)


def with_memory(hardware: Hardware, gib: float) -> Hardware:
    """The same devices with another memory."""
    memory = DetectedValue(round(gib * 2**30), "a test")
    return hardware._replace(devices=tuple(replace(device, memory=memory) for device in hardware.devices))
