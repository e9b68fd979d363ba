"""The TransformerConfig that megatron-core needs for a recipe, in whatever release is installed."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from bundle.architectures import MLA, Architecture, MoE
from bundle.mcore import known
from bundle.recipe import Recipe

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def transformer_config(recipe: Recipe, backend_options: Mapping[str, Any]) -> TransformerConfig:
    """The configuration of the whole model; `backend_options` are the backend's (fusions, grouped GEMM, FP8).

    Raises whatever megatron-core raises for a combination that it refuses.
    """
    architecture, model, parallel = recipe.architecture, recipe.model, recipe.parallel
    dtype = DTYPES[model.dtype]
    options: dict[str, Any] = {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "ffn_hidden_size": architecture.ffn_hidden_size,
        "num_attention_heads": architecture.num_attention_heads,
        "num_query_groups": architecture.num_query_groups,
        "kv_channels": architecture.kv_channels,
        "layernorm_epsilon": architecture.norm_epsilon,
        "normalization": "RMSNorm",
        "qk_layernorm": architecture.qk_layernorm,
        "add_bias_linear": False,
        "add_qkv_bias": architecture.qkv_bias,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "attention_dropout": architecture.attention_dropout,
        "hidden_dropout": 0.0,
        "init_method_std": architecture.initializer_range,
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "sequence_parallel": parallel.sequence_parallel,
        "calculate_per_token_loss": True,
        # The schedules' default (batched) exchange swaps the two directions when pp is 2 and chunks
        # interleave, on a collective backend that matches messages by order (a known trap).
        "batch_p2p_comm": parallel.vpp is None,
        "overlap_p2p_comm": parallel.vpp is not None,
    }
    if parallel.cp > 1:
        options["cp_comm_type"] = "p2p"
    if architecture.mtp_layers:
        options |= {
            "mtp_num_layers": architecture.mtp_layers,
            "mtp_loss_scaling_factor": model.mtp.loss_scale,
        }
    if model.recompute is not None:
        options |= _recompute(model.recompute)
    if architecture.moe is not None:
        options |= _experts(architecture.moe) | {
            "moe_router_bias_update_rate": model.moe.bias_update_rate,
        }
        # 0.16 and later choose experts behind this; earlier ones behind the router itself.
        options |= known(TransformerConfig, moe_enable_routing_replay=model.router_replay)
    kind = TransformerConfig
    if architecture.mla is not None:
        kind = MLATransformerConfig
        fused = bool(backend_options.get("apply_rope_fusion"))
        options |= _latent_attention(architecture, architecture.mla, fused=fused)
    return kind(**{**options, **backend_options})


def _recompute(recompute: Any) -> dict[str, Any]:
    if recompute.granularity == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": recompute.method,
            "recompute_num_layers": recompute.layers,
        }
    return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}


def _experts(moe: MoE) -> dict[str, Any]:
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.topk,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_layer_freq": list(moe.layer_pattern),
        "moe_router_score_function": moe.score_function,
        "moe_router_pre_softmax": moe.pre_softmax,
        "moe_router_topk_scaling_factor": moe.scaling_factor,
        "moe_router_num_groups": moe.groups,
        "moe_router_group_topk": moe.group_topk,
        "moe_router_enable_expert_bias": moe.expert_bias,
        # The engine adds the losses that balance experts itself, with the same numbers in every layout.
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
    }


def _latent_attention(architecture: Architecture, mla: MLA, *, fused: bool) -> dict[str, Any]:
    """Rotary settings are passed whole: their defaults changed in 0.14 and would change the softmax scale.

    Frequencies are not among them (`mcore.rotary`): megatron is asked for plain positions, or for the class
    of embedding that its fused kernel takes.
    """
    scaling = architecture.rope_scaling
    softmax_mscale = scaling.softmax_mscale if scaling else 0.0
    return {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_head_dim,
        "qk_pos_emb_head_dim": mla.qk_pos_emb_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rotary_base": architecture.rotary_base,
        "rope_type": "yarn" if fused else "rope",
        "rotary_scaling_factor": scaling.factor if scaling else 1.0,
        # The softmax is scaled by the first to 0.13, by the second from 0.14; with both alike, by no more.
        "mscale": softmax_mscale,
        "mscale_all_dim": softmax_mscale,
    }
