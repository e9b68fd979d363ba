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
_REFUSES_PACKS = _has(_PREDICTION, r"assert \(?\s*packed_seq_params is None")

PRESENT: dict[str, Criterion] = {
    "mla-packed-qkv": _any(
        _lacks(_LATENT, "cu_seqlens_q_padded"),
        _lacks(_LATENT, r"elif (not thd_packed_seq|packed_seq_params is None) or self\.config\.context_par"),
    ),
    "mla-thd-value-padding": _lacks(_LATENT, r"F\.pad\("),
    "cpu-mla-without-te-linear": _has(_LATENT, r"not in \[[^]]*\bTELinear\b", r" in \[\s*TELinear"),
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
    "mtp-without-labels": _always,
    "mtp-packed-full-recompute": _all(
        _has(_PREDICTION, r"def _checkpointed_forward\(self, forward_func, \*args, \*\*kwargs\)"),
        lambda text: not _REFUSES_PACKS(text),
    ),
    "mtp-full-recompute": _all(
        _has(_PREDICTION, r"_checkpointed_forward\([^)]*padding_mask=padding_mask"),
        _lacks(_PREDICTION, r"def _checkpointed_forward\([^)]*(padding_mask|\*\*kwargs)"),
    ),
    "recompute-reclaim": _always,
    "router-replay": _lacks(f"{_MOE}.router", "router_replay"),
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
    "cpu-router-without-te-gemm": _all(
        _has(f"{_MOE}.moe_utils", r"te_general_gemm is not None"),
        _lacks(f"{_MOE}.moe_utils", r"te_general_gemm,?\s*\) = \(None|te_general_gemm = None"),
    ),
    "cpu-optimizer-without-fp8-quantize": _has(
        "fp8_utils", r"def _quantize_param_shard_impl\([^)]*\)[^:]*:\s*raise RuntimeError"
    ),
    "moe-tensor-without-expert-parallel": _lacks("tensor_parallel.layers", "use_expert_pgs"),
    "mtp-packed": _REFUSES_PACKS,
    "mtp-tensor-parallel": _has(_PREDICTION, r"= all_gather_last_dim_from_tensor_parallel_region\("),
    "interleaved-batched-exchange": _always,
    "overlap-tied-mtp": _lacks("distributed.param_and_grad_buffer", "golden_per_param_grad_ready_counts"),
}
