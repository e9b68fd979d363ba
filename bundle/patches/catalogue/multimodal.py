"""Models that put other embeddings among those of the text."""

from typing import TYPE_CHECKING

from bundle.patches.entry import Patch, Presence, Replacement

if TYPE_CHECKING:
    from bundle.patches.definitions import Evidence

_PREDICTION = "megatron.core.transformer.multi_token_prediction"
_BLOCK = f"{_PREDICTION}:MultiTokenPredictionBlock.forward"
_EMBEDDINGS = f"{_PREDICTION}:MultiTokenPredictionLayer._get_embeddings"


def _embeddings_of_the_whole_sequence(source: "Evidence") -> Presence:
    """Whether the embeddings of the prediction layers are taken as the embedding returns them."""
    code = source[_EMBEDDINGS] or source[_BLOCK]  # to 0.13 the block takes them itself
    if code is None or not code.calls("embedding"):
        return Presence.UNKNOWN
    return Presence.of(not code.calls("scatter_to_sequence_parallel_region"))


PATCHES = (
    Patch(
        id="mtp-whole-embeddings",
        replacements=(
            Replacement(_BLOCK, "bundle.wrappers.multimodal:scattered_embeddings", by_signature=True),
        ),
        why=(
            "Multi-token prediction fails under sequence parallelism in a model whose embedding does not "
            "share out the sequence (scatter_embedding_sequence_parallel=False, as in multimodal models)."
        ),
        upstream="NVIDIA/Megatron-LM#6256, on main since August 2026; NVIDIA-NeMo/RL#3494",
        range="",
        when=frozenset({"mtp", "sp", "multimodal"}),
        assumes="the caller shares out what it gives the model as decoder_input",
        evidence=(_EMBEDDINGS, _BLOCK),
        defect=_embeddings_of_the_whole_sequence,
        check="mtp-whole-embeddings",
    ),
)
