"""Multi-latent attention."""

import ast
from typing import TYPE_CHECKING

from bundle.patches.entry import NOTHING, Patch, Presence, Replacement

if TYPE_CHECKING:
    from bundle.patches.definitions import Evidence

_MODULE = "megatron.core.transformer.multi_latent_attention"
_HEADS = f"{_MODULE}:MLASelfAttention.get_query_key_value_tensors"
_FORWARD = f"{_MODULE}:MultiLatentAttention.forward"
_RUN = f"{_MODULE}:MultiLatentAttention._run_core_attention"
_PREPARE = f"{_MODULE}:_prepare_mla_core_attention_value"
_PROJECTIONS = f"{_MODULE}:MLASelfAttention.__init__"
_TE_LINEAR = f"{_MODULE}:TELinear"
_RESOLVE = "megatron.core.transformer.mla_qk_norm_config:QKNormConfigResolver._resolve_mla_qk_layernorm"


def _packed_heads(source: "Evidence") -> Presence:
    """Whether one of three parts is missing: padded boundaries, YaRN's whole table, its staying whole."""
    heads = source[_HEADS]
    if heads is None or not heads.has("cu_seqlens_q = packed_seq_params.cu_seqlens_q"):
        return Presence.UNKNOWN
    padded = heads.has("cu_seqlens_q = packed_seq_params.cu_seqlens_q_padded")
    if not padded and "cu_seqlens_q_padded" in heads.names:
        return Presence.UNKNOWN
    if not padded or heads.has("self.rotary_pos_emb(rotary_seq_len)"):
        return Presence.PRESENT
    kept = heads.has("_ or self.config.context_parallel_size == 1")
    return Presence.ABSENT if kept else Presence.UNKNOWN


def _value_width(source: "Evidence") -> Presence:
    codes = [code for code in (source[_FORWARD], source[_RUN], source[_PREPARE]) if code is not None]
    if any(code.has("value = F.pad(value, _)") for code in codes):
        return Presence.ABSENT
    heads = source[_HEADS]
    if any(code.calls("pad") for code in (*codes, *([heads] if heads else ()))):
        return Presence.UNKNOWN  # somebody pads somewhere: what the wrapper would cut may be cut already
    attends = any(code.calls("core_attention") for code in codes)
    return Presence.PRESENT if attends else Presence.UNKNOWN


def _down_projection_class(source: "Evidence") -> Presence:
    """Whether the class of the down projections must be in a list with TELinear, None without it."""
    init = source[_PROJECTIONS]
    if init is None or not init.calls("build_module"):
        return Presence.UNKNOWN
    if init.has("submodules.linear_kv_down_proj in [TELinear]"):
        return Presence.PRESENT if source.bindings(_TE_LINEAR) else Presence.UNKNOWN
    built = [call for call in init.calls("build_module") if call.args]
    asked = any(isinstance(node, ast.In | ast.NotIn) for node in init.walk()) or "TELinear" in init.names
    gathered = any(keyword.arg == "gather_output" for call in built for keyword in call.keywords)
    return Presence.ABSENT if gathered and not asked else Presence.UNKNOWN


def _query_norm(source: "Evidence") -> Presence:
    """Whether a query projection that is not compressed is made one with a norm, whatever the spec says."""
    resolve, init = source[_RESOLVE], source[_PROJECTIONS]
    if resolve is not None:
        folded = resolve.has(
            "self._mla_fused_linear_or_default(self.submodules.linear_q_proj, 'linear_q_proj')"
        )
        return Presence.PRESENT if folded else Presence.UNKNOWN
    plain = [] if init is None else init.calls("build_module")
    as_given = any(call.args and ast.unparse(call.args[0]) == "submodules.linear_q_proj" for call in plain)
    return Presence.ABSENT if as_given else Presence.UNKNOWN


PATCHES = (
    Patch(
        id="mla-packed-qkv",
        replacements=(
            Replacement(_HEADS, "bundle.wrappers.mla:packed_heads"),
            Replacement(
                f"{_MODULE}:apply_rotary_pos_emb", "bundle.wrappers.mla:packed_rotary", by_signature=True
            ),
            Replacement(
                "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:get_pos_emb_on_this_cp_rank",
                "bundle.wrappers.mla:whole_table",
                by_signature=True,
            ),
        ),
        why=(
            "Packed input fails: 0.12 keeps a batch dimension of 1 in front of the heads, 0.13 too reads the "
            "boundaries without padding and cuts the rotary table to the tokens of one context-parallel rank."
        ),
        silent=False,
        upstream="fixed upstream in 0.14; found by comparing packed with unpacked passes",
        range="<0.14",
        fixed_in="0.14.0",
        when=frozenset({"mla", "packed"}),
        assumes=(
            "the padded boundaries, where given, are those of the whole pack, not yet cut for context "
            "parallel"
        ),
        evidence=(_HEADS,),
        defect=_packed_heads,
    ),
    Patch(
        id="mla-thd-value-padding",
        replacements=(
            Replacement(
                f"{_MODULE}:MultiLatentAttention.__init__", "bundle.wrappers.mla:pad_value", by_signature=True
            ),
        ),
        why=(
            "Packed input whose value heads are narrower than its query heads is refused by kernels that "
            "want one width, or comes back too wide for the output projection."
        ),
        silent=False,
        upstream="NVIDIA/Megatron-LM#3003 (5dcda195), released in 0.18.0; NVIDIA/TransformerEngine#2629",
        range="<0.18",
        fixed_in="0.18.0",
        when=frozenset({"mla", "packed", "unequal-head-dims", "attention-flash"}),
        assumes=NOTHING,
        evidence=(_FORWARD, _RUN, _PREPARE, _HEADS),
        defect=_value_width,
    ),
    Patch(
        id="cpu-mla-without-te-linear",
        replacements=(
            Replacement(
                _TE_LINEAR, "bundle.wrappers.mla:duplicated_linear", exclusive=True, by_signature=True
            ),
        ),
        why=(
            "Without Transformer Engine the down projections can only be column parallel, whose gather drops "
            "the other ranks' part of a gradient: the class must be one of a list in which TELinear is None."
        ),
        silent=True,
        upstream="found by comparing TP2 with one process",
        range=">=0.14",
        backends=("cpu",),
        when=frozenset({"mla"}),
        assumes=NOTHING,
        evidence=(_PROJECTIONS, _TE_LINEAR),
        defect=_down_projection_class,
    ),
    Patch(
        id="mla-uncompressed-query-norm",
        replacements=(
            Replacement(
                f"{_MODULE}:MLASelfAttention._resolve_qk_norm_config",
                "bundle.wrappers.mla:plain_query_projection",
                by_signature=True,
            ),
        ),
        why=(
            "With q_lora_rank null and qk_layernorm, which the norm of keys and values needs, the query "
            "projection gets a norm of its own that DeepSeek-V2-Lite and Moonlight do not have; megatron's "
            "own local spec is refused."
        ),
        silent=True,
        upstream="found by comparing releases with transformers",
        range=">=0.19",
        when=frozenset({"mla"}),
        assumes=NOTHING,
        evidence=(_RESOLVE, _PROJECTIONS),
        defect=_query_norm,
    ),
)
