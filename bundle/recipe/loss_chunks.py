"""Decides how the loss takes a micro-batch's tokens, for the engine and for the memory estimate."""

from typing import NamedTuple

from bundle.architectures import pad_vocab_to_lcm
from bundle.recipe.recipe import Recipe

# The logits of a chunk, 1 GiB in bf16: the gradient of a weight is read and written once for each chunk.
_CHUNK_LOGITS = 1 << 29
# The logits that all losses of a micro-batch together keep for the backward pass, 4 GiB in bf16.
_KEPT_LOGITS = 1 << 31
# The least logits of a micro-batch on a rank that are worth another way than megatron's own loss.
_LEAST_LOGITS = 1 << 27
_ALIGNMENT = 128  # rows that a matrix product takes at once


class LossChunks(NamedTuple):
    """Each loss keeps the logits of the first `kept_tokens` tokens of a micro-batch for the backward pass.

    It computes the others `size` at a time, and again in the backward pass.
    """

    kept_tokens: int
    size: int


def choose_loss_chunks(recipe: Recipe) -> LossChunks | None:
    """Return how the loss takes tokens; None where a rank has so few logits that megatron's loss serves."""
    local_logits = compute_local_vocab_size(recipe)
    tokens = count_microbatch_tokens(recipe)
    if tokens * local_logits < _LEAST_LOGITS:
        return None
    losses = 1 + recipe.architecture.mtp_layers
    kept_tokens = _count_tokens(_KEPT_LOGITS // losses, local_logits)
    return LossChunks(min(tokens, kept_tokens), _count_tokens(_CHUNK_LOGITS, local_logits))


def count_microbatch_tokens(recipe: Recipe) -> int:
    """Return the tokens of a micro-batch on a rank."""
    return recipe.data.sequence_length // recipe.parallel.cp * recipe.micro_batch_full_rows


def _count_tokens(logits: int, local_logits: int) -> int:
    """Return the most tokens that have so many logits; of many, rounded down to a multiple of 128."""
    tokens = logits // local_logits
    return max(1, tokens - tokens % _ALIGNMENT if tokens >= _ALIGNMENT else tokens)


def compute_local_vocab_size(recipe: Recipe) -> int:
    """Return the logits of one token on a rank, padding included."""
    tp = recipe.parallel.tp
    return pad_vocab_to_lcm(recipe.architecture.vocab_size, tp) // tp
