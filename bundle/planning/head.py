"""The memory of the output layer and the losses: what they save, and what they add for a moment."""

from typing import NamedTuple

from bundle.planning.size import FP32
from bundle.recipe.loss_chunks import LossChunks

ID_BYTES = 8  # bytes of a token's id, and of an expert's number
# Of a token whose loss is computed in chunks: its label, norm, entropy and a factor.
CHUNKED_LOSS_BYTES_PER_TOKEN = ID_BYTES + 3 * FP32


class HeadBytes(NamedTuple):
    """Counts the bytes of the losses of one micro-batch.

    `tokens` are this rank's, `stream_bytes` those of the hidden states that it holds. `chunks` tells how the
    loss takes the tokens, None for all at once.
    """

    tokens: int
    stream_bytes: int
    element_bytes: int
    hidden_size: int
    local_logits: int
    chunks: LossChunks | None
    is_dpo: bool
    is_frozen: bool
    is_fused: bool

    def count_saved_bytes(self, losses: int) -> int:
        """Return the bytes of the output layer's input of each loss, and of its softmax, in fp32.

        The softmax is over the vocabulary. A preference's loss keeps the logits in their own type instead. In
        chunks a loss keeps those of some tokens, and its input whole on every tensor-parallel rank.
        """
        if self.chunks is not None:
            inputs = self.hidden_size * self.element_bytes
            logits = self.chunks.kept_tokens * self.local_logits * self.element_bytes
            return losses * (self.tokens * (inputs + ID_BYTES + CHUNKED_LOSS_BYTES_PER_TOKEN) + logits)
        scored = losses > 0 and self.is_dpo
        logit_bytes = self.local_logits * ((losses - scored) * FP32 + scored * self.element_bytes)
        inputs = 0 if self.is_frozen else self.stream_bytes
        return losses * (inputs + self.tokens * ID_BYTES) + self.tokens * logit_bytes

    def count_transient_bytes(self, losses: int) -> int:
        """Return the bytes of every loss's logits beside the softmax, and of the fp32 copy of a fused loss.

        A preference's loss has its gradient there. What it computes at a time is no more than a workspace. In
        chunks: the logits of one chunk, which the backward pass computes in the memory of those that were
        kept, and the gradient of all inputs. A trained weight adds the gradient for autograd and, unless
        products are fused, the product of a chunk.
        """
        if not losses:
            return 0
        if self.chunks is not None:
            chunk = min(self.chunks.size, self.tokens - self.chunks.kept_tokens)
            weights = 0 if self.is_frozen else 1 if self.is_fused else 2
            rows = self.tokens + weights * self.local_logits
            return self.element_bytes * max(chunk * self.local_logits, rows * self.hidden_size)
        plain_losses = losses - self.is_dpo
        copies = 0 if self.element_bytes == FP32 else plain_losses * self.element_bytes
        fused = FP32 if self.is_fused and plain_losses else 0
        return self.tokens * self.local_logits * (copies + fused + self.is_dpo * self.element_bytes)
