"""Multi-latent attention: packed input, its projections, and its gradients over tensor-parallel ranks."""

import ast

from bundle.patches.definitions import Definition, Evidence
from bundle.patches.entry import (
    LOCAL_LAYERS,
    NOTHING,
    DefectKind,
    Patch,
    Presence,
    Replacement,
    Trap,
    asks,
    called,
    reads,
)

_MODULE = "megatron.core.transformer.multi_latent_attention"
_HEADS = f"{_MODULE}:MLASelfAttention.get_query_key_value_tensors"
_FORWARD = f"{_MODULE}:MultiLatentAttention.forward"
_RUN = f"{_MODULE}:MultiLatentAttention._run_core_attention"
_PREPARE = f"{_MODULE}:_prepare_mla_core_attention_value"
_PROJECTIONS = f"{_MODULE}:MLASelfAttention.__init__"
_TE_LINEAR = f"{_MODULE}:TELinear"
_RESOLVE = "megatron.core.transformer.mla_qk_norm_config:QKNormConfigResolver._resolve_mla_qk_layernorm"
_FINALIZE = "megatron.core.distributed.finalize_model_grads"
_SUMS = f"{_FINALIZE}:_allreduce_non_tensor_model_parallel_grads"
_SUMS_OF_NORMS = f"{_FINALIZE}:_allreduce_layernorm_grads"  # to 0.12
_MAKING_KEYS = {  # what rotary keys go through, of which nothing adds up over ranks but the gather
    "split",
    "squeeze",
    "unsqueeze",
    "expand",
    "apply_rotary_pos_emb",
    "apply_rotary_emb_key",
    "gather_from_sequence_parallel_region",
}


@reads(_HEADS)
def _packed_heads(heads: Definition) -> Presence:
    """Whether one of three parts is missing: padded boundaries, YaRN's whole table, its staying whole."""
    if not heads.has("cu_seqlens_q = packed_seq_params.cu_seqlens_q"):
        return Presence.UNKNOWN
    padded = heads.has("cu_seqlens_q = packed_seq_params.cu_seqlens_q_padded")
    if not padded and "cu_seqlens_q_padded" in heads.names:
        return Presence.UNKNOWN
    kept = heads.has("_ or self.config.context_parallel_size == 1")
    return Presence.told(not padded or heads.has("self.rotary_pos_emb(rotary_seq_len)"), absent=kept)


@asks(_FORWARD, _RUN, _PREPARE, _HEADS)
def _value_width(source: Evidence) -> Presence:
    """Whether values go into core attention as they are."""
    codes = source.there(_FORWARD, _RUN, _PREPARE)
    if any(code.has("value = F.pad(value, _)") for code in codes):
        return Presence.ABSENT
    # Somebody pads somewhere: what the wrapper would cut may be cut already.
    elsewhere = any(code.calls("pad") for code in (*codes, *source.there(_HEADS)))
    return Presence.told(not elsewhere and any(code.calls("core_attention") for code in codes))


@asks(_PROJECTIONS, _TE_LINEAR)
def _down_projection_class(source: Evidence) -> Presence:
    """Whether the class of the down projections must be in a list with TELinear, None without it."""
    init = source[_PROJECTIONS]
    if init is None or not init.calls("build_module"):
        return Presence.UNKNOWN
    if init.has("submodules.linear_kv_down_proj in [TELinear]"):
        return Presence.told(source.bindings(_TE_LINEAR))
    built = [call for call in init.calls("build_module") if call.args]
    asked = any(isinstance(node, ast.In | ast.NotIn) for node in init.walk()) or "TELinear" in init.names
    gathered = any(keyword.arg == "gather_output" for call in built for keyword in call.keywords)
    return Presence.told(absent=gathered and not asked)


@asks(_RESOLVE, _PROJECTIONS)
def _query_norm(source: Evidence) -> Presence:
    """Whether a query projection that is not compressed is made one with a norm, whatever the spec says."""
    resolve, init = source[_RESOLVE], source[_PROJECTIONS]
    if resolve is not None:
        folding = "self._mla_fused_linear_or_default(self.submodules.linear_q_proj, 'linear_q_proj')"
        return Presence.told(resolve.has(folding))
    plain = [] if init is None else init.calls("build_module")
    as_given = any(call.args and ast.unparse(call.args[0]) == "submodules.linear_q_proj" for call in plain)
    return Presence.told(absent=as_given)


@reads(_HEADS)
def _whole_keys_gathered(heads: Definition) -> Presence:
    """Whether rotary keys are gathered from ranks that hold the whole already."""
    if "gather_from_sequence_parallel_region" not in heads.names:
        return Presence.UNKNOWN
    sizes = ("parallel_state.get_tensor_model_parallel_world_size() > 1", "get_pg_size(self.tp_group) > 1")
    if any(heads.has(f"{size} and self.config.sequence_parallel") for size in sizes):
        return Presence.ABSENT
    gather = "k_pos_emb = gather_from_sequence_parallel_region(...)"
    return Presence.told(any(heads.has(f"if {size}:\n    {gather}") for size in sizes))


# Where whole keys are gathered, latent attention fails before it has a gradient.
_BEFORE = {Presence.PRESENT: Presence.ABSENT, Presence.UNKNOWN: Presence.UNKNOWN}


@asks(_HEADS)
def _gradient_of_one_rank(source: Evidence) -> Presence:
    """Whether each rank's heads give the rotary key a gradient that nothing adds up."""
    heads, gathered = source[_HEADS], _whole_keys_gathered(source)
    if heads is None or gathered in _BEFORE:
        return _BEFORE[gathered]
    summed = heads.has("k_pos_emb = copy_to_tensor_model_parallel_region(...)")
    made = {_function(value) for value in heads.assigned("k_pos_emb")}
    return Presence.told(not summed and made <= _MAKING_KEYS, absent=summed)


def _function(value: str) -> str:
    """The name of the function or method that a value is the result of; "" where it is of none."""
    call = ast.parse(value, mode="eval").body
    name = call.func if isinstance(call, ast.Call) else None
    return name.id if isinstance(name, ast.Name) else getattr(name, "attr", "")


@asks(_HEADS, _SUMS, _SUMS_OF_NORMS)
def _summed_by_name(source: Evidence) -> Presence:
    """Whether a norm is summed over the ranks for being called q_layernorm, as those of single heads are."""
    sums, gathered = source[_SUMS] or source[_SUMS_OF_NORMS], _whole_keys_gathered(source)
    if sums is None:
        return Presence.UNKNOWN
    if gathered in _BEFORE:
        return _BEFORE[gathered]
    either = "'q_layernorm' in name or 'k_layernorm' in name"
    by_name = sums.has(f"config.qk_layernorm and ({either})") or sums.has(f"_ or {either}")
    told_apart = any("multi_latent" in name or "mla" in name.lower() for name in sums.names)
    return Presence.told(by_name and not told_apart)


PATCHES = (
    Patch(
        id="mla-packed-qkv",
        replacements=(
            Replacement(_HEADS, "mla:packed_heads"),
            called(f"{_MODULE}:apply_rotary_pos_emb", "mla:packed_rotary"),
            called(
                "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:get_pos_emb_on_this_cp_rank",
                "mla:whole_table",
            ),
        ),
        why=(
            "Packed input fails: 0.12 keeps a batch dimension of 1 in front of the heads, 0.13 too reads the "
            "boundaries without padding and cuts the rotary table to the tokens of one context-parallel rank."
        ),
        kind=DefectKind.ERROR,
        upstream="fixed upstream in 0.14; found by comparing packed with unpacked passes",
        range="<0.14",
        when=frozenset({"mla", "packed"}),
        assumes=(
            "the padded boundaries, where given, are those of the whole pack, not yet cut for context "
            "parallel"
        ),
        defect=_packed_heads,
    ),
    Patch(
        id="mla-thd-value-padding",
        replacements=(called(f"{_MODULE}:MultiLatentAttention.__init__", "mla:pad_value"),),
        why=(
            "Packed input whose value heads are narrower than its query heads is refused by kernels that "
            "want one width, or comes back too wide for the output projection."
        ),
        kind=DefectKind.ERROR,
        upstream="NVIDIA/Megatron-LM#3003 (5dcda195), released in 0.18.0; NVIDIA/TransformerEngine#2629",
        range="<0.18",
        backends=("cpu", "cuda"),  # npu_fusion_attention takes packed values that are narrower than keys
        when=frozenset({"mla", "packed", "unequal-head-dims", "attention-flash"}),
        assumes=NOTHING,
        defect=_value_width,
    ),
    Patch(
        id="mla-without-te-linear",
        replacements=(called(_TE_LINEAR, "mla:duplicated_linear", exclusive=True),),
        why=(
            "Without Transformer Engine the down projections can only be column parallel, whose gather drops "
            "the other ranks' part of a gradient: the class must be one of a list in which TELinear is None."
        ),
        kind=DefectKind.SILENT,
        upstream="found by comparing TP2 with one process",
        range=">=0.14",
        backends=LOCAL_LAYERS,
        when=frozenset({"mla"}),
        assumes=NOTHING,
        defect=_down_projection_class,
    ),
    Patch(
        id="mla-uncompressed-query-norm",
        replacements=(
            called(f"{_MODULE}:MLASelfAttention._resolve_qk_norm_config", "mla:plain_query_projection"),
        ),
        why=(
            "With q_lora_rank null and qk_layernorm, which the norm of keys and values needs, the query "
            "projection gets a norm of its own that DeepSeek-V2-Lite and Moonlight do not have; megatron's "
            "own local spec is refused."
        ),
        kind=DefectKind.SILENT,
        upstream="found by comparing releases with transformers",
        range=">=0.19",
        when=frozenset({"mla"}),
        assumes=NOTHING,
        defect=_query_norm,
    ),
    Patch(
        id="mla-rotary-key-gradient",
        replacements=(called(_PROJECTIONS, "mla:sum_rotary_key"),),
        why=(
            "Wrong gradients of the down projection and of all below it, another on each rank: under tensor "
            "without sequence parallelism the heads share a rotary key whose gradient is not summed over the "
            "ranks."
        ),
        kind=DefectKind.SILENT,
        upstream="NVIDIA/Megatron-LM#6839 (open), #1699; NVIDIA/TransformerEngine#1975",
        range=">=0.14",
        when=frozenset({"mla", "tp"}),
        assumes=NOTHING,
        defect=_gradient_of_one_rank,
    ),
    Patch(
        id="mla-query-norm-gradient",
        replacements=(called(_PROJECTIONS, "mla:share_out_query_norm"),),
        why=(
            "The gradient of the norm of compressed queries is too large by the number of tensor-parallel "
            "ranks, without sequence parallelism: it is whole on each, and summed for its name."
        ),
        kind=DefectKind.SILENT,
        upstream="not reported; found by comparing TP2 with one process (gradient off by 1e+0)",
        range=">=0.14",
        when=frozenset({"mla", "tp"}),
        assumes="gradients are made final by megatron's finalize_model_grads",
        defect=_summed_by_name,
    ),
)
TRAPS = (
    Trap(
        id="mla-tensor-without-sequence-parallel",
        range="<0.14",
        defect=_whole_keys_gathered,
        when=frozenset({"mla", "tp"}),
        unless=frozenset({"sp"}),
        why="Latent attention fails over tensor-parallel ranks without sequence parallelism.",
        cause=(
            "MLASelfAttention gathers the rotary keys of all tensor-parallel ranks as parts of a sequence, "
            "whether it is shared out or not; since 0.14 only if it is"
        ),
        kind=DefectKind.ERROR,
        instead="Set parallel.sequence_parallel to true, or use megatron-core 0.14 or later.",
    ),
)
