"""Decides how many tokens the loss takes at a time, for the engine and for the memory estimate alike."""

from bundle.architectures import pad_vocab_to_lcm
from bundle.recipe.recipe import Recipe

# The logits of a chunk, 512 MiB in bf16: wide enough for fast matrix products.
_CHUNK_LOGITS = 1 << 28
# The least logits of a micro-batch on a rank for which chunks are used: 4 GiB in bf16, and 8 more in fp32.
_CHUNKING_THRESHOLD_LOGITS = 1 << 31


def choose_loss_chunk(recipe: Recipe) -> int | None:
    """Return the tokens of a chunk; None where a rank computes the logits of a micro-batch at once.

    Chunks cost one more matrix product in the backward pass, so that only many logits are worth it.
    """
    local_logits = compute_local_vocab_size(recipe)
    tokens = recipe.data.sequence_length // recipe.parallel.cp * recipe.micro_batch_full_rows
    return count_chunk_tokens(local_logits) if tokens * local_logits >= _CHUNKING_THRESHOLD_LOGITS else None


def count_chunk_tokens(local_logits: int) -> int:
    """Return the tokens of a chunk on a rank that has so many logits of one token."""
    return max(1, _CHUNK_LOGITS // local_logits)


def compute_local_vocab_size(recipe: Recipe) -> int:
    """Return the logits of one token on a rank, padding included."""
    tp = recipe.parallel.tp
    return pad_vocab_to_lcm(recipe.architecture.vocab_size, tp) // tp
