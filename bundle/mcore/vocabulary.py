"""The loss over a vocabulary that tensor-parallel ranks share."""

import torch
from megatron.core import tensor_parallel


def smoothed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Megatron's loss [s, b] of this rank's columns of the logits [s, b, v / tp], in the current groups."""
    loss: torch.Tensor = tensor_parallel.vocab_parallel_cross_entropy(logits, labels, smoothing)
    return loss
