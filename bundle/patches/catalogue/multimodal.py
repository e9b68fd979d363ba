"""Models that put other embeddings among those of the text."""

import ast

from bundle.patches.definitions import Definition, Evidence
from bundle.patches.entry import Patch, Presence, Trap, asks, called, reads

_PREDICTION = "megatron.core.transformer.multi_token_prediction"
_APPLY = "megatron.core.transformer.attention:apply_rotary_pos_emb"
_BLOCK = f"{_PREDICTION}:MultiTokenPredictionBlock.forward"
_GPT = "megatron.core.models.gpt.gpt_model:GPTModel.forward"
_ROTARY = "megatron.core.models.common.embeddings.rotary_pos_embedding"
_POSITIONS = f"{_ROTARY}:MultimodalRotaryEmbedding.forward"
_EMBEDDINGS = f"{_PREDICTION}:MultiTokenPredictionLayer._get_embeddings"
_LLAVA = "megatron.core.models.multimodal.llava_model:LLaVAModel"
_LLAVA_EMBEDDINGS = f"{_LLAVA}._process_embedding_token_parallel"
_LLAVA_INIT = f"{_LLAVA}.__init__"
_PACKED = {"packed_seq", "packed_seq_params"}
_SHARED_OUT = {  # by whom, in each release
    "parallel_state.get_context_parallel_world_size() > 1",
    "self.cp_group is not None and self.cp_group.size() > 1",
    "cp_group is not None and cp_group.size() > 1",
}


@asks(_EMBEDDINGS, _BLOCK)
def _embeddings_of_the_whole_sequence(source: Evidence) -> Presence:
    """Whether the embeddings of the prediction layers are taken as the embedding returns them."""
    code = source[_EMBEDDINGS] or source[_BLOCK]  # to 0.13 the block takes them itself
    if code is None or not code.calls("embedding"):
        return Presence.UNKNOWN
    known = {"embedding(input_ids=input_ids, position_ids=position_ids)", "decoder_input.detach()"}
    scattered = code.calls("scatter_to_sequence_parallel_region")
    return Presence.told(not scattered and code.assigned("decoder_input") <= known, absent=scattered)


@reads(_POSITIONS)
def _packs_are_cut(positions: Definition) -> Presence:
    """Whether a table is cut for context parallel without a question whether it is of a pack."""
    if not positions.calls("get_pos_emb_on_this_cp_rank"):
        return Presence.UNKNOWN
    branches = (
        node for node in positions.each(ast.If) if "get_pos_emb_on_this_cp_rank(" in ast.unparse(node)
    )
    tests = {ast.unparse(branch.test) for branch in branches}
    asked = any(f"not {name}" in test for name in positions.parameters & _PACKED for test in tests)
    return Presence.told(tests and tests <= _SHARED_OUT, absent=asked)


@asks(_LLAVA_EMBEDDINGS, _LLAVA_INIT)
def _images_over_the_layout(source: Evidence) -> Presence:
    """Whether the embeddings of text and images are shared out over the ranks of the layout."""
    if not source.has_module(_LLAVA_EMBEDDINGS):
        return Presence.ABSENT
    shared, init = source[_LLAVA_EMBEDDINGS], source[_LLAVA_INIT]
    if shared is None or init is None:
        return Presence.UNKNOWN
    if not init.parameters & {"pg_collection", "model_comm_pgs"}:
        return Presence.ABSENT  # there are no ranks but the layout's
    calls = shared.calls("scatter_to_sequence_parallel_region")
    if not calls:
        return Presence.UNKNOWN
    return Presence.of(any(len(call.args) + len(call.keywords) == 1 for call in calls))


PATCHES = (
    Patch(
        id="mrope-packed",
        replacements=(
            called(_GPT, "attention:packed_positions"),
            called(f"{_ROTARY}:get_pos_emb_on_this_cp_rank", "mla:whole_table"),
            called(_APPLY, "attention:rows_of_the_pack"),
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
        defect=_packs_are_cut,
    ),
    Patch(
        id="mtp-whole-embeddings",
        replacements=(called(_BLOCK, "mtp:scattered_embeddings"),),
        why=(
            "Multi-token prediction fails under sequence parallelism in a model whose embedding does not "
            "share out the sequence (scatter_embedding_sequence_parallel=False, as in multimodal models)."
        ),
        silent=False,
        upstream="NVIDIA/Megatron-LM#6256, on main since August 2026; NVIDIA-NeMo/RL#3494",
        range="",
        when=frozenset({"mtp", "sp", "multimodal"}),
        assumes="the caller shares out what it gives the model as decoder_input",
        defect=_embeddings_of_the_whole_sequence,
    ),
)
TRAPS = (
    Trap(
        id="llava-groups",
        range=">=0.14",
        defect=_images_over_the_layout,
        when=frozenset({"llava", "explicit-groups", "tp", "sp"}),
        why="LLaVA gives ranks the embeddings of others: they are shared out over the layout's ranks.",
        cause="scatter_to_sequence_parallel_region is given no group; #7452 (finding 7)",
        silent=True,
        instead="Take the groups of the layout.",
        unshown="read only: needs megatron's LLaVAModel with a vision model",
    ),
)
