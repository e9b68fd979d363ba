"""What packed input makes the host read back from the device, layer by layer."""

import ast
from typing import TYPE_CHECKING

from bundle.patches.entry import NOTHING, Patch, Presence, Replacement

if TYPE_CHECKING:
    from bundle.patches.definitions import Evidence

_ROTARY = "megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd"
_ATTENTION = "megatron.core.extensions.transformer_engine:TEDotProductAttention.__init__"
_PACKS = "megatron.core.packed_seq_params:PackedSeqParams"


def _reads_lengths_back(source: "Evidence") -> Presence:
    """Whether the lengths of the sequences are made plain numbers, to cut the rows by them."""
    packed = source[_ROTARY]
    if packed is None:
        return Presence.UNKNOWN
    if packed.calls("tolist") and packed.calls("split"):
        return Presence.PRESENT
    lengths = {"tolist", "split"} & packed.names
    return Presence.ABSENT if packed.calls("searchsorted") and not lengths else Presence.UNKNOWN


def _packs_cannot_say(source: "Evidence") -> Presence:
    """Whether all fields of a pack are handed on, of which none says whether it is padded."""
    init, packed = source[_ATTENTION], source[_PACKS]
    if init is None or packed is None or "kept_packed_seq_params" not in init.names:
        return Presence.UNKNOWN
    fields = {node.target.id for node in packed.walk() if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    return (
        Presence.of("pad_between_seqs" not in fields) if "cu_seqlens_q_padded" in fields else Presence.UNKNOWN
    )


PATCHES = (
    Patch(
        id="packed-rotary-host-reads",
        replacements=(Replacement(_ROTARY, "bundle.wrappers.packed:packed_by_one_gather"),),
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
        evidence=(_ROTARY,),
        defect=_reads_lengths_back,
    ),
    Patch(
        id="cuda-attention-host-reads",
        replacements=(
            Replacement(_ATTENTION, "bundle.wrappers.packed:say_whether_padded", by_signature=True),
        ),
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
        evidence=(_ATTENTION, _PACKS),
        defect=_packs_cannot_say,
    ),
)
