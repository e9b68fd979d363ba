"""What packed input makes the host read back from the device, layer by layer."""

import ast

from bundle.patches.definitions import Definition
from bundle.patches.entry import NOTHING, Patch, Presence, Replacement, called, reads

_ROTARY = "megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd"
_ATTENTION = "megatron.core.extensions.transformer_engine:TEDotProductAttention.__init__"
_PACKS = "megatron.core.packed_seq_params:PackedSeqParams"


@reads(_ROTARY)
def _reads_lengths_back(packed: Definition) -> Presence:
    """Whether the lengths of the sequences are made plain numbers, to cut the rows by them."""
    lengths = {"tolist", "split"} & packed.names
    return Presence.told(
        packed.calls("tolist") and packed.calls("split"),
        absent=packed.calls("searchsorted") and not lengths,
    )


@reads(_ATTENTION, _PACKS)
def _packs_cannot_say(init: Definition, packed: Definition) -> Presence:
    """Whether all fields of a pack are handed on, of which none says whether it is padded."""
    fields = {ast.unparse(node.target) for node in packed.each(ast.AnnAssign)}
    if "kept_packed_seq_params" not in init.names or "cu_seqlens_q_padded" not in fields:
        return Presence.UNKNOWN
    return Presence.of("pad_between_seqs" not in fields)


PATCHES = (
    Patch(
        id="packed-rotary-host-reads",
        replacements=(Replacement(_ROTARY, "attention:packed_by_one_gather"),),
        why=(
            "Where rotary positions are not one kernel (latent attention without YaRN), every layer reads "
            "the lengths of packed sequences back from the device, twice, and handles them one by one: the "
            "host waits, and falls behind with many short sequences."
        ),
        silent=False,
        upstream="not reported; seen in a profile of one H200 (40 waits in a step of ten attention layers)",
        range="",
        when=frozenset({"packed"}),
        assumes="the boundaries cover every row of the pack",
        defect=_reads_lengths_back,
    ),
    Patch(
        id="cuda-attention-host-reads",
        replacements=(called(_ATTENTION, "attention:say_whether_padded"),),
        why=(
            "In every layer Transformer Engine compares the boundaries of packed sequences with the padded "
            "ones on the device, and the host waits for the answer, which it knows."
        ),
        silent=False,
        upstream="fixed upstream in 0.19; seen in a profile of one H200 (20 waits in a step of ten layers)",
        range="<0.19",
        fixed_in="0.19.0",
        backends=("cuda",),
        when=frozenset({"packed"}),
        assumes=NOTHING,
        defect=_packs_cannot_say,
    ),
)
