"""Where each defect is, told by the words of the files: nothing of what decides is asked, nothing is parsed.

A criterion was written after reading every change of the code that it is about from 0.12 to August 2026, on
main, dev and the release branches. It is about that history alone and guesses elsewhere.
"""

import re
from collections.abc import Callable

Text = Callable[[str], str]  # a module below megatron.core -> its text; "" where the commit does not have it
Criterion = Callable[[Text], bool]

_LATENT = "transformer.multi_latent_attention"
_PREDICTION = "transformer.multi_token_prediction"
_GPT = "models.gpt.gpt_model"
_MOE = "transformer.moe"
_CHECKPOINT = "dist_checkpointing"
_TE = "extensions.transformer_engine"
_ROUTER = f"{_MOE}.router"
_DISTRIBUTED = "optimizer.distrib_optimizer"
_LANGUAGE = "models.common.language_module.language_module"
_LLAVA = "models.multimodal.llava_model"
_FSDP = "distributed.fsdp.mcore_fsdp_adapter"
_ROPE = "models.common.embeddings"


def _has(module: str, *words: str) -> Criterion:
    """Whether any of these regular expressions is found in a module."""
    return lambda text: any(re.search(word, text(module)) for word in words)


def _lacks(module: str, word: str) -> Criterion:
    return lambda text: not re.search(word, text(module))


def _all(*criteria: Criterion) -> Criterion:
    return lambda text: all(criterion(text) for criterion in criteria)


def _any(*criteria: Criterion) -> Criterion:
    return lambda text: any(criterion(text) for criterion in criteria)


def _always(text: Text) -> bool:
    return True


_ROLLS_OVER_RANKS = _has(_PREDICTION, r"def roll_tensor\([^)]*cp_group")
_RATIO = _has(_PREDICTION, r"original_num_tokens = loss_mask\.sum\(\)")
_WHOLE_KEYS = r"> 1\s+and self\.config\.sequence_parallel\s*\)?:\s+(#[^\n]*\s+)?k_pos_emb = gather_"
_REFUSES_PACKS = _has(_PREDICTION, r"assert \(?\s*packed_seq_params is None")
_ASKS_FOR_NO_LABELS = _lacks(
    _GPT, r"if (mtp_in_postprocess|self\.mtp_process) and (mtp_kwargs|mtp_labels|labels)\b"
)

PRESENT: dict[str, Criterion] = {
    "mla-packed-qkv": _any(
        _lacks(_LATENT, "cu_seqlens_q_padded"),
        _lacks(_LATENT, r"elif (not thd_packed_seq|packed_seq_params is None) or self\.config\.context_par"),
    ),
    "mla-thd-value-padding": _lacks(_LATENT, r"F\.pad\("),
    "mla-without-te-linear": _has(_LATENT, r"not in \[[^]]*\bTELinear\b", r" in \[\s*TELinear"),
    "mtp-context-parallel-roll": _has(_PREDICTION, r"def roll_tensor\(tensor, shifts=-1, dims=-1\):"),
    "mtp-packed-roll-boundaries": _all(
        _has(_PREDICTION, r"def _roll_tensor_packed_seq\("),
        _lacks(_PREDICTION, r"Prefer the padded cumulative|def _get_packed_roll_cu_seqlens"),
    ),
    "mtp-loss-context-parallel-count": _all(
        _ROLLS_OVER_RANKS,
        _lacks(_PREDICTION, "original_num_tokens"),
        _any(*(_has(module, r"loss_mask, num_tokens = roll_tensor\(") for module in (_GPT, _PREDICTION))),
    ),
    "mtp-loss-context-parallel-normalisation": _RATIO,
    "mtp-zero-layers": _has(_GPT, r"if self\.config\.mtp_num_layers is not None:"),
    "mtp-without-labels": _all(_ASKS_FOR_NO_LABELS, _lacks(_PREDICTION, "derived_labels_from_input_ids")),
    "mtp-labels-from-input": _all(_ASKS_FOR_NO_LABELS, _has(_PREDICTION, "derived_labels_from_input_ids")),
    "mtp-packed-full-recompute": _all(
        _has(_PREDICTION, r"def _checkpointed_forward\(self, forward_func, \*args, \*\*kwargs\)"),
        _lacks(_PREDICTION, r"is_tensor\(arg\)"),
        lambda text: not _REFUSES_PACKS(text),
    ),
    "mtp-full-recompute": _all(
        _has(_PREDICTION, r"_checkpointed_forward\([^)]*padding_mask=padding_mask"),
        _lacks(_PREDICTION, r"def _checkpointed_forward\([^)]*(padding_mask|\*\*kwargs)"),
    ),
    "recompute-reclaim": _always,
    "sort-of-sorted-tokens": _has(f"{_MOE}.token_dispatcher", "def dispatch_postprocess"),
    "router-replay": _lacks(f"{_MOE}.router", "router_replay|routing_replay"),
    "router-replay-by-layer": _has(f"{_MOE}.router_replay", "class RouterReplay"),
    "native-replay-recompute": _has(f"{_MOE}.router_replay", "class RouterReplay"),
    "per-token-loss-context-parallel": _has(
        "distributed.finalize_model_grads",
        r"all_reduce\(\s*num_tokens, group=parallel_state\.get_data_parallel_group\(\)",
    ),
    "shared-embedding-bucket": _has(
        "distributed.param_and_grad_buffer", r"param_start_index % self\.data_parallel_world_size"
    ),
    "cuda-norm-of-whole-weights": _lacks(_TE, r"Mark as NOT tensor parallel"),
    "cuda-norm-of-expert-weights": _lacks(_TE, "def _set_expert_parameter_attributes"),
    "dist-checkpoint-serialization": _lacks(
        f"{_CHECKPOINT}.strategies.filesystem_async", "(?i)serialization_?format"
    ),
    "dist-checkpoint-numpy-product": _any(
        *(
            _has(f"{_CHECKPOINT}.{name}", r"np\.product")
            for name in ("mapping", "validation", "exchange_utils")
        )
    ),
    "restricted-unpickle": _has(f"{_CHECKPOINT}.strategies.common", r"weights_only=False"),
    "cpu-moe-splits-on-host": _always,
    "router-without-te-gemm": _all(
        _has(f"{_MOE}.moe_utils", r"te_general_gemm is not None"),
        _lacks(f"{_MOE}.moe_utils", r"te_general_gemm,?\s*\) = \(None|te_general_gemm = None"),
    ),
    "optimizer-without-fp8-quantize": _has(
        "fp8_utils", r"def _quantize_param_shard_impl\([^)]*\)[^:]*:\s*raise RuntimeError"
    ),
    "moe-tensor-without-expert-parallel": _lacks("tensor_parallel.layers", "use_expert_pgs"),
    "mtp-packed": _REFUSES_PACKS,
    "mtp-tensor-parallel": _has(_PREDICTION, r"= all_gather_last_dim_from_tensor_parallel_region\("),
    "mla-uncompressed-query-norm": _has(
        "transformer.mla_qk_norm_config", r"or_default\(\s*self\.submodules\.linear_q_proj"
    ),
    "mla-rotary-key-gradient": _has(_LATENT, _WHOLE_KEYS),
    "mla-query-norm-gradient": _all(
        _has(_LATENT, _WHOLE_KEYS), _has("distributed.finalize_model_grads", "q_layernorm")
    ),
    "mla-tensor-without-sequence-parallel": _lacks(_LATENT, _WHOLE_KEYS),
    "mtp-per-token-weight": _lacks(_PREDICTION, "original_num_tokens"),
    "packed-rotary-host-reads": _has(f"{_ROPE}.rope_utils", r"(cp_size|\[:-1\])\)\.tolist\(\)"),
    "cuda-attention-host-reads": _lacks("packed_seq_params", "pad_between_seqs"),
    "balancing-per-token-ranks": _lacks(
        _ROUTER, r"\* num_local_tokens \* self\.tp_cp_group|aux_loss_scale_num_tokens"
    ),
    "balancing-mean-context-parallel": _lacks("pipeline_parallel.schedules", r"loss_scale \* cp_"),
    "balancing-per-token-rows": _all(
        _has(_ROUTER, "valid_token_count"), _lacks(_ROUTER, r"\* bsz recovers the micro-batch total")
    ),
    "expert-bias-counts": _lacks(_ROUTER, r"local_tokens_per_expert\.(dtype|data|float)\b"),
    "offload-stale-weights": _has(
        _DISTRIBUTED,
        r"HybridDeviceOptimizer\):\s+(self\.optimizer\.update_fp32_param_by_new_param\(\)\s+)?return\n",
    ),
    "offload-resume-fp32": _lacks(
        "optimizer.cpu_offloading.hybrid_optimizer", "Native FP32 params do not need a separate master"
    ),
    "padding-mask-expert-bias": _has(_ROUTER, r"routing_map & \(~padding_mask\)\n"),
    "padding-mask-own-count": _has(f"{_MOE}.moe_utils", r"local_num_tokens = \w+\.sum\(\) /"),
    "global-aux-loss-tokens": _has(_ROUTER, "averated_tokens_per_expert"),
    "label-smoothing-over-ranks": _has("tensor_parallel.cross_entropy", r"average_grad = 1 / vocab_size"),
    "loss-of-gathered-logits": _lacks(_LANGUAGE, "scatter_to_tensor"),
    "optimizer-checkpoint-default": _all(
        _has(f"{_CHECKPOINT}.mapping", "ShardedTensor.flattened_range is not supported"),
        _has(_DISTRIBUTED, r"sharding_type', 'fully_sharded_model_space'\n"),
    ),
    "frozen-weight-product": _lacks("tensor_parallel.layers", r"grad_output_2d\.matmul\(weight\)"),
    "optimizer-gather-memory": _has(_DISTRIBUTED, r"send_tensor\.cuda\(\)"),
    "dp-reshardable-steps": _all(
        _has(_DISTRIBUTED, "STEP is a 0-dim tensor"), _lacks(_DISTRIBUTED, r"pop\('step', None\)")
    ),
    "attention-sinks-norm": _all(
        _has("transformer.dot_product_attention", "softmax_offset"),
        _lacks("transformer.dot_product_attention", "tensor_model_parallel"),
    ),
    "cross-attention-groups": _all(
        _has("transformer.attention", r"class SelfAttention[\s\S]*tp_group=[\s\S]*class CrossAttention"),
        _lacks("transformer.attention", r"self\.linear_q = (?:(?!self\.linear_kv)[\s\S])*tp_group"),
    ),
    "gated-delta-norm-gradient": _any(
        _has("ssm.gated_delta_net", "out_norm"), _has("ssm.gated_delta_net.common", "out_norm")
    ),
    "gated-delta-net-packed": _has("ssm.gated_delta_net", "GDN does not support (THD )?packed sequence"),
    "output-gate-of-shared-groups": _all(
        _has("transformer.attention", "output_gate"),
        _has("transformer.attention", r"query = query\["),
        _lacks("transformer.attention", r"gate = gate\["),
    ),
    "mrope-packed": _lacks(
        f"{_ROPE}.rotary_pos_embedding", r"class Multimodal[\s\S]*?size\(\) > 1 and \(?not packed_seq"
    ),
    "mtp-whole-embeddings": _lacks(_PREDICTION, r"embedding, .scatter_to_sequence_parallel"),
    "interleaved-batched-exchange": _always,
    "balancing-of-prompts": _has(_ROUTER, r"if self\.calculate_per_token_loss:"),
    "balancing-of-packs": _lacks(_ROUTER, "cu_seqlens"),
    "balancing-of-padding": _lacks(_ROUTER, "padding_mask"),
    "tied-mtp-checkpoint": _has(
        "models.common.language_module.language_module",
        r"'mtp_process', False\):\s+# No output layer\s+assert output_layer_weight_key not in",
    ),
    "overlap-tied-mtp": _lacks("distributed.param_and_grad_buffer", "golden_per_param_grad_ready_counts"),
    "mtp-recompute-fp8": _has(_PREDICTION, r"te_checkpoint\([\s\S]{0,300}?\*\*kwargs"),
    "mtp-recompute-groups": _has(
        _PREDICTION, r"te_checkpoint\([\s\S]{0,300}?parallel_state\.get_tensor_model_parallel_group\(\)"
    ),
    "padding-mask-stages": _has(
        _GPT, r"self\.pre_process:\s+if padding_mask is not None:[\s\S]{0,2000}?scatter_to_sequence_parallel"
    ),
    "llava-groups": _all(
        _has(_LLAVA, r"def __init__\([^)]*(pg_collection|model_comm_pgs)"),
        _has(_LLAVA, r"scatter_to_sequence_parallel_region\(\s*combined_embeddings\s*\)"),
    ),
    "fsdp-checkpoint-stages": _has(
        _FSDP, r"self\.module\.state_dict_for_save_checkpoint = self\.module\.state_dict\n"
    ),
    "mxfp8-gather-of-experts": _all(
        _has(_DISTRIBUTED, "def _copy_main_params_to_param_buffer"), _lacks(_DISTRIBUTED, "_defer_param_sync")
    ),
}
