"""Models that put other embeddings among those of the text."""

import ast
from typing import TYPE_CHECKING

from bundle.patches.entry import Patch, Presence, Replacement

if TYPE_CHECKING:
    from bundle.patches.definitions import Evidence

_PREDICTION = "megatron.core.transformer.multi_token_prediction"
_APPLY = "megatron.core.transformer.attention:apply_rotary_pos_emb"
_WRAPPERS = "bundle.wrappers.multimodal"
_BLOCK = f"{_PREDICTION}:MultiTokenPredictionBlock.forward"
_GPT = "megatron.core.models.gpt.gpt_model:GPTModel.forward"
_ROTARY = "megatron.core.models.common.embeddings.rotary_pos_embedding"
_POSITIONS = f"{_ROTARY}:MultimodalRotaryEmbedding.forward"
_EMBEDDINGS = f"{_PREDICTION}:MultiTokenPredictionLayer._get_embeddings"
_PACKED = {"packed_seq", "packed_seq_params"}
_SHARED_OUT = {  # by whom, in each release
    "parallel_state.get_context_parallel_world_size() > 1",
    "self.cp_group is not None and self.cp_group.size() > 1",
    "cp_group is not None and cp_group.size() > 1",
}


def _embeddings_of_the_whole_sequence(source: "Evidence") -> Presence:
    """Whether the embeddings of the prediction layers are taken as the embedding returns them."""
    code = source[_EMBEDDINGS] or source[_BLOCK]  # to 0.13 the block takes them itself
    if code is None or not code.calls("embedding"):
        return Presence.UNKNOWN
    if code.calls("scatter_to_sequence_parallel_region"):
        return Presence.ABSENT
    known = {"embedding(input_ids=input_ids, position_ids=position_ids)", "decoder_input.detach()"}
    return Presence.PRESENT if code.assigned("decoder_input") <= known else Presence.UNKNOWN


def _packs_are_cut(source: "Evidence") -> Presence:
    """Whether a table is cut for context parallel without a question whether it is of a pack."""
    positions = source[_POSITIONS]
    if positions is None or not positions.calls("get_pos_emb_on_this_cp_rank"):
        return Presence.UNKNOWN
    cutting = "get_pos_emb_on_this_cp_rank("
    branches = [
        node for node in positions.walk() if isinstance(node, ast.If) and cutting in ast.unparse(node)
    ]
    tests = {ast.unparse(branch.test) for branch in branches}
    if tests and tests <= _SHARED_OUT:
        return Presence.PRESENT
    asked = any(f"not {name}" in test for name in positions.parameters & _PACKED for test in tests)
    return Presence.ABSENT if asked else Presence.UNKNOWN


PATCHES = (
    Patch(
        id="mrope-packed",
        replacements=(
            Replacement(_GPT, f"{_WRAPPERS}:packed_positions", by_signature=True),
            Replacement(
                f"{_ROTARY}:get_pos_emb_on_this_cp_rank", f"{_WRAPPERS}:whole_table", by_signature=True
            ),
            Replacement(_APPLY, f"{_WRAPPERS}:rows_of_the_pack", by_signature=True),
        ),
        why=(
            "Packs with multimodal positions (mrope) get wrong ones: under context parallel their table is "
            "cut as if the pack were one sequence, and to 0.15 each sequence takes the first rows of it."
        ),
        silent=True,
        upstream="NVIDIA/Megatron-LM#1612, NVIDIA-NeMo/Megatron-Bridge#1776; slime and miles carry a change",
        range="",
        when=frozenset({"mrope", "packed"}),
        assumes="position ids [3, 1, t] are those of the whole pack, padding included, on every rank",
        evidence=(_POSITIONS,),
        defect=_packs_are_cut,
    ),
    Patch(
        id="mtp-whole-embeddings",
        replacements=(
            Replacement(_BLOCK, "bundle.wrappers.multimodal:scattered_embeddings", by_signature=True),
        ),
        why=(
            "Multi-token prediction fails under sequence parallelism in a model whose embedding does not "
            "share out the sequence (scatter_embedding_sequence_parallel=False, as in multimodal models)."
        ),
        silent=False,
        upstream="NVIDIA/Megatron-LM#6256, on main since August 2026; NVIDIA-NeMo/RL#3494",
        range="",
        when=frozenset({"mtp", "sp", "multimodal"}),
        assumes="the caller shares out what it gives the model as decoder_input",
        evidence=(_EMBEDDINGS, _BLOCK),
        defect=_embeddings_of_the_whole_sequence,
    ),
)
