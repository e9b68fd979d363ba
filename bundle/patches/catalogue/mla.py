"""Multi-latent attention: packed input, its projections, and its gradients over tensor-parallel ranks."""

import ast

from bundle.patches.definitions import Definition, EvidenceDefinitions
from bundle.patches.entry import (
    LOCAL_LAYER_BACKENDS,
    NO_CALLER_ASSUMPTION,
    DefectKind,
    Patch,
    Presence,
    Replacement,
    Trap,
    build_signature_replacement,
    detect_in_definitions,
    detect_in_source,
)

_MODULE = "megatron.core.transformer.multi_latent_attention"
_QUERY_KEY_VALUE_TARGET = f"{_MODULE}:MLASelfAttention.get_query_key_value_tensors"
_FORWARD = f"{_MODULE}:MultiLatentAttention.forward"
_RUN_ATTENTION = f"{_MODULE}:MultiLatentAttention._run_core_attention"
_PREPARE_VALUE_TARGET = f"{_MODULE}:_prepare_mla_core_attention_value"
_MLA_INIT_TARGET = f"{_MODULE}:MLASelfAttention.__init__"
_TE_LINEAR = f"{_MODULE}:TELinear"
_RESOLVE_QK_NORM = (
    "megatron.core.transformer.mla_qk_norm_config:QKNormConfigResolver._resolve_mla_qk_layernorm"
)
_FINALIZE_GRADS_MODULE = "megatron.core.distributed.finalize_model_grads"
_NON_TP_GRAD_ALLREDUCE_TARGET = f"{_FINALIZE_GRADS_MODULE}:_allreduce_non_tensor_model_parallel_grads"
_ALLREDUCE_NORM_GRADS = f"{_FINALIZE_GRADS_MODULE}:_allreduce_layernorm_grads"  # to 0.12
_ROTARY_KEY_PATH_CALLS = {  # functions that rotary keys go through; only the gather sums over ranks
    "split",
    "squeeze",
    "unsqueeze",
    "expand",
    "apply_rotary_pos_emb",
    "apply_rotary_emb_key",
    "gather_from_sequence_parallel_region",
}


@detect_in_definitions(_QUERY_KEY_VALUE_TARGET)
def _detect_incomplete_packed_qkv(heads: Definition) -> Presence:
    """Return whether one of three parts is missing.

    The parts are: padded boundaries, YaRN's whole table, and that this table stays whole.
    """
    if not heads.has_pattern("cu_seqlens_q = packed_seq_params.cu_seqlens_q"):
        return Presence.UNKNOWN
    padded = heads.has_pattern("cu_seqlens_q = packed_seq_params.cu_seqlens_q_padded")
    if not padded and "cu_seqlens_q_padded" in heads.identifiers:
        return Presence.UNKNOWN
    keeps_table = heads.has_pattern("_ or self.config.context_parallel_size == 1")
    return Presence.from_matches(
        not padded or heads.has_pattern("self.rotary_pos_emb(rotary_seq_len)"), absent=keeps_table
    )


@detect_in_source(_FORWARD, _RUN_ATTENTION, _PREPARE_VALUE_TARGET, _QUERY_KEY_VALUE_TARGET)
def _keeps_value_width(source: EvidenceDefinitions) -> Presence:
    """Return whether values go into core attention without padding to another width."""
    codes = source.find_existing(_FORWARD, _RUN_ATTENTION, _PREPARE_VALUE_TARGET)
    if any(code.has_pattern("value = F.pad(value, _)") for code in codes):
        return Presence.ABSENT
    # Padding elsewhere: the values that the wrapper would cut may be cut already.
    is_padded = any(
        code.find_calls("pad") for code in (*codes, *source.find_existing(_QUERY_KEY_VALUE_TARGET))
    )
    return Presence.from_matches(not is_padded and any(code.find_calls("core_attention") for code in codes))


@detect_in_source(_MLA_INIT_TARGET, _TE_LINEAR)
def _requires_te_linear(source: EvidenceDefinitions) -> Presence:
    """Return whether the down projections' class must be in a list with TELinear, which may be None."""
    init = source[_MLA_INIT_TARGET]
    if init is None or not init.find_calls("build_module"):
        return Presence.UNKNOWN
    if init.has_pattern("submodules.linear_kv_down_proj in [TELinear]"):
        return Presence.from_matches(source.find_bindings(_TE_LINEAR))
    built = [call for call in init.find_calls("build_module") if call.args]
    checks_class = (
        any(isinstance(node, ast.In | ast.NotIn) for node in init.walk()) or "TELinear" in init.identifiers
    )
    gathered = any(keyword.arg == "gather_output" for call in built for keyword in call.keywords)
    return Presence.from_matches(absent=gathered and not checks_class)


@detect_in_source(_RESOLVE_QK_NORM, _MLA_INIT_TARGET)
def _forces_query_norm(source: EvidenceDefinitions) -> Presence:
    """Return whether an uncompressed query projection gets a norm, whatever the spec says."""
    resolve, init = source[_RESOLVE_QK_NORM], source[_MLA_INIT_TARGET]
    if resolve is not None:
        folding = "self._mla_fused_linear_or_default(self.submodules.linear_q_proj, 'linear_q_proj')"
        return Presence.from_matches(resolve.has_pattern(folding))
    plain = [] if init is None else init.find_calls("build_module")
    uses_spec = any(call.args and ast.unparse(call.args[0]) == "submodules.linear_q_proj" for call in plain)
    return Presence.from_matches(absent=uses_spec)


@detect_in_definitions(_QUERY_KEY_VALUE_TARGET)
def _detect_replicated_rotary_key_gather(heads: Definition) -> Presence:
    """Return whether rotary keys are gathered from ranks that hold the whole keys already."""
    if "gather_from_sequence_parallel_region" not in heads.identifiers:
        return Presence.UNKNOWN
    sizes = ("parallel_state.get_tensor_model_parallel_world_size() > 1", "get_pg_size(self.tp_group) > 1")
    if any(heads.has_pattern(f"{size} and self.config.sequence_parallel") for size in sizes):
        return Presence.ABSENT
    gather = "k_pos_emb = gather_from_sequence_parallel_region(...)"
    return Presence.from_matches(any(heads.has_pattern(f"if {size}:\n    {gather}") for size in sizes))


# Where whole keys are gathered, latent attention fails before it has a gradient.
_PRESENCE_BY_GATHER_PRESENCE = {Presence.PRESENT: Presence.ABSENT, Presence.UNKNOWN: Presence.UNKNOWN}


@detect_in_source(_QUERY_KEY_VALUE_TARGET)
def _skips_key_gradient_sum(source: EvidenceDefinitions) -> Presence:
    """Return whether each rank's heads give the rotary key a gradient that nothing sums over the ranks."""
    heads, gathered = source[_QUERY_KEY_VALUE_TARGET], _detect_replicated_rotary_key_gather(source)
    if heads is None or gathered in _PRESENCE_BY_GATHER_PRESENCE:
        return _PRESENCE_BY_GATHER_PRESENCE[gathered]
    summed = heads.has_pattern("k_pos_emb = copy_to_tensor_model_parallel_region(...)")
    producers = {_parse_unqualified_callee_name(value) for value in heads.find_assigned_values("k_pos_emb")}
    return Presence.from_matches(not summed and producers <= _ROTARY_KEY_PATH_CALLS, absent=summed)


def _parse_unqualified_callee_name(value: str) -> str:
    """Return the name of the function or method whose result a value is; "" where it is not a call."""
    call = ast.parse(value, mode="eval").body
    name = call.func if isinstance(call, ast.Call) else None
    return name.id if isinstance(name, ast.Name) else getattr(name, "attr", "")


@detect_in_source(_QUERY_KEY_VALUE_TARGET, _NON_TP_GRAD_ALLREDUCE_TARGET, _ALLREDUCE_NORM_GRADS)
def _sums_norm_by_name(source: EvidenceDefinitions) -> Presence:
    """Return whether a norm is summed over the ranks because its name is q_layernorm, as of single heads."""
    sums, gathered = (
        source[_NON_TP_GRAD_ALLREDUCE_TARGET] or source[_ALLREDUCE_NORM_GRADS],
        _detect_replicated_rotary_key_gather(source),
    )
    if sums is None:
        return Presence.UNKNOWN
    if gathered in _PRESENCE_BY_GATHER_PRESENCE:
        return _PRESENCE_BY_GATHER_PRESENCE[gathered]
    either = "'q_layernorm' in name or 'k_layernorm' in name"
    by_name = sums.has_pattern(f"config.qk_layernorm and ({either})") or sums.has_pattern(f"_ or {either}")
    told_apart = any("multi_latent" in name or "mla" in name.lower() for name in sums.identifiers)
    return Presence.from_matches(by_name and not told_apart)


PATCHES = (
    Patch(
        id="mla-packed-qkv",
        replacements=(
            Replacement(_QUERY_KEY_VALUE_TARGET, "mla:compute_packed_qkv"),
            build_signature_replacement(
                f"{_MODULE}:apply_rotary_pos_emb", "mla:rotate_packed_with_full_table"
            ),
            build_signature_replacement(
                "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:get_pos_emb_on_this_cp_rank",
                "mla:keep_full_rotary_table",
            ),
        ),
        why=(
            "Packed input fails. Release 0.12 keeps a batch dimension of 1 in front of the heads. Releases "
            "0.12 and 0.13 ignore the padded boundaries of sequences, and cut the rotary table as for the "
            "tokens of one context-parallel rank."
        ),
        kind=DefectKind.ERROR,
        upstream="fixed upstream in 0.14; found by comparing packed with unpacked passes",
        range="<0.14",
        when=frozenset({"mla", "packed"}),
        assumes=("padded boundaries, if any, are those of the whole pack, not yet cut for context parallel"),
        defect=_detect_incomplete_packed_qkv,
    ),
    Patch(
        id="mla-thd-value-padding",
        replacements=(
            build_signature_replacement(f"{_MODULE}:MultiLatentAttention.__init__", "mla:pad_value_heads"),
        ),
        why=(
            "Packed input fails if value heads are narrower than query heads. Some kernels need one width "
            "and refuse it. The output of others is too wide for the output projection."
        ),
        kind=DefectKind.ERROR,
        upstream="NVIDIA/Megatron-LM#3003 (5dcda195), released in 0.18.0; NVIDIA/TransformerEngine#2629",
        range="<0.18",
        backends=("cpu", "cuda"),  # npu_fusion_attention takes packed values that are narrower than keys
        when=frozenset({"mla", "packed", "unequal-head-dims", "attention-flash"}),
        assumes=NO_CALLER_ASSUMPTION,
        defect=_keeps_value_width,
    ),
    Patch(
        id="mla-without-te-linear",
        replacements=(
            build_signature_replacement(_TE_LINEAR, "mla:provide_duplicated_linear", exclusive=True),
        ),
        why=(
            "Without Transformer Engine, the q and kv down projections of latent attention can only be "
            "column-parallel. The reason: for a projection that is whole on every rank, megatron-core allows "
            "only Transformer Engine's class TELinear. The gather after a column-parallel projection drops "
            "the other ranks' part of each gradient."
        ),
        kind=DefectKind.SILENT,
        upstream="found by comparing TP2 with one process",
        range=">=0.14",
        backends=LOCAL_LAYER_BACKENDS,
        when=frozenset({"mla"}),
        assumes=NO_CALLER_ASSUMPTION,
        defect=_requires_te_linear,
    ),
    Patch(
        id="mla-uncompressed-query-norm",
        replacements=(
            build_signature_replacement(
                f"{_MODULE}:MLASelfAttention._resolve_qk_norm_config", "mla:drop_uncompressed_query_norm"
            ),
        ),
        why=(
            "Latent attention has its norm of keys and values only with qk_layernorm. But without "
            "compressed queries (q_lora_rank null), qk_layernorm also adds a norm to the query projection, "
            "which DeepSeek-V2-Lite and Moonlight do not have. Megatron's own local spec is refused."
        ),
        kind=DefectKind.SILENT,
        upstream="found by comparing releases with transformers",
        range=">=0.19",
        when=frozenset({"mla"}),
        assumes=NO_CALLER_ASSUMPTION,
        defect=_forces_query_norm,
    ),
    Patch(
        id="mla-rotary-key-gradient",
        replacements=(build_signature_replacement(_MLA_INIT_TARGET, "mla:sum_rotary_key_gradient"),),
        why=(
            "In MLA, all heads share one rotary key. With tensor but without sequence parallelism, its "
            "gradient is not summed over the ranks. Therefore the down projection and the layers before it "
            "get wrong gradients, different ones on each rank."
        ),
        kind=DefectKind.SILENT,
        upstream="NVIDIA/Megatron-LM#6839 (open), #1699; NVIDIA/TransformerEngine#1975",
        range=">=0.14",
        when=frozenset({"mla", "tp"}),
        assumes=NO_CALLER_ASSUMPTION,
        defect=_skips_key_gradient_sum,
    ),
    Patch(
        id="mla-query-norm-gradient",
        replacements=(
            build_signature_replacement(_MLA_INIT_TARGET, "mla:hook_query_norm_gradient_division"),
        ),
        why=(
            "Without sequence parallelism the gradient of the norm of compressed queries is too large by"
            " the number of tensor-parallel ranks. Each rank already has the full gradient, but the"
            " gradients are summed over the ranks because of the parameter's name."
        ),
        kind=DefectKind.SILENT,
        upstream="not reported; found by comparing TP2 with one process (gradient off by 1e+0)",
        range=">=0.14",
        when=frozenset({"mla", "tp"}),
        assumes="gradients are made final by megatron's finalize_model_grads",
        defect=_sums_norm_by_name,
    ),
)
TRAPS = (
    Trap(
        id="mla-tensor-without-sequence-parallel",
        range="<0.14",
        defect=_detect_replicated_rotary_key_gather,
        when=frozenset({"mla", "tp"}),
        unless=frozenset({"sp"}),
        why="Latent attention fails over tensor-parallel ranks without sequence parallelism.",
        cause=(
            "MLASelfAttention gathers the rotary keys of all tensor-parallel ranks as parts of a sequence,"
            " even if the sequence is not divided; since 0.14 only if it is"
        ),
        kind=DefectKind.ERROR,
        instead="Set parallel.sequence_parallel to true, or use megatron-core 0.14 or later.",
    ),
)
