"""Multi-latent attention over tensor-parallel ranks of which each holds the whole sequence."""

import ast
from typing import TYPE_CHECKING

from bundle.patches.entry import NOTHING, Patch, Presence, Replacement

if TYPE_CHECKING:
    from bundle.patches.definitions import Definition, Evidence

_MODULE = "megatron.core.transformer.multi_latent_attention"
_ATTENTION = f"{_MODULE}:MLASelfAttention"
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
HEADS = f"{_ATTENTION}.get_query_key_value_tensors"


def gathers_always(heads: "Definition") -> bool | None:
    """Whether rotary keys are gathered from ranks that hold the whole already; None: neither way is there."""
    if "gather_from_sequence_parallel_region" not in heads.names:
        return None
    sizes = ("parallel_state.get_tensor_model_parallel_world_size() > 1", "get_pg_size(self.tp_group) > 1")
    if any(heads.has(f"{size} and self.config.sequence_parallel") for size in sizes):
        return False
    gather = "k_pos_emb = gather_from_sequence_parallel_region(...)"
    alone = any(heads.has(f"if {size}:\n    {gather}") for size in sizes)
    return True if alone else None


def _gradient_of_one_rank(source: "Evidence") -> Presence:
    """Whether each rank's heads give the rotary key a gradient that nothing adds up."""
    heads = source[HEADS]
    always = None if heads is None else gathers_always(heads)
    if heads is None or always is None:
        return Presence.UNKNOWN
    if always:
        return Presence.ABSENT  # it fails before
    if heads.has("k_pos_emb = copy_to_tensor_model_parallel_region(...)"):
        return Presence.ABSENT
    made = {_function(value) for value in heads.assigned("k_pos_emb")}
    return Presence.PRESENT if made <= _MAKING_KEYS else Presence.UNKNOWN


def _function(value: str) -> str:
    """The name of the function or method that a value is the result of; "" where it is of none."""
    call = ast.parse(value, mode="eval").body
    name = call.func if isinstance(call, ast.Call) else None
    return name.id if isinstance(name, ast.Name) else getattr(name, "attr", "")


def _summed_by_name(source: "Evidence") -> Presence:
    """Whether a norm is summed over the ranks for being called q_layernorm, as those of single heads are."""
    heads, sums = source[HEADS], source[_SUMS] or source[_SUMS_OF_NORMS]
    always = None if heads is None else gathers_always(heads)
    if always is None or sums is None:
        return Presence.UNKNOWN
    if always:
        return Presence.ABSENT  # it fails before
    either = "'q_layernorm' in name or 'k_layernorm' in name"
    by_name = sums.has(f"config.qk_layernorm and ({either})") or sums.has(f"_ or {either}")
    told_apart = any("multi_latent" in name or "mla" in name.lower() for name in sums.names)
    return Presence.PRESENT if by_name and not told_apart else Presence.UNKNOWN


PATCHES = (
    Patch(
        id="mla-rotary-key-gradient",
        replacements=(
            Replacement(f"{_ATTENTION}.__init__", "bundle.wrappers.mla:sum_rotary_key", by_signature=True),
        ),
        why=(
            "Wrong gradients of the down projection and of all below it, another on each rank: under tensor "
            "without sequence parallelism the heads share a rotary key whose gradient is not summed over the "
            "ranks."
        ),
        silent=True,
        upstream="NVIDIA/Megatron-LM#6839 (open), #1699; NVIDIA/TransformerEngine#1975",
        range=">=0.14",
        when=frozenset({"mla", "tp"}),
        assumes=NOTHING,
        evidence=(HEADS,),
        defect=_gradient_of_one_rank,
    ),
    Patch(
        id="mla-query-norm-gradient",
        replacements=(
            Replacement(
                f"{_ATTENTION}.__init__", "bundle.wrappers.mla:share_out_query_norm", by_signature=True
            ),
        ),
        why=(
            "The gradient of the norm of compressed queries is too large by the number of tensor-parallel "
            "ranks, without sequence parallelism: it is whole on each, and summed for its name."
        ),
        silent=True,
        upstream="not reported; found by comparing TP2 with one process (gradient off by 1e+0)",
        range=">=0.14",
        when=frozenset({"mla", "tp"}),
        assumes="gradients are made final by megatron's finalize_model_grads",
        evidence=(HEADS, _SUMS, _SUMS_OF_NORMS),
        defect=_summed_by_name,
    ),
)
