"""The loss where tensor-parallel ranks share the vocabulary: label smoothing, and logits that are whole."""

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel

from bundle.mcore.signatures import known
from bundle.wrappers import Function, around


@around
def smoothed_over_all_columns(
    original: Function,
    logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Returns `vocab_parallel_cross_entropy` that smooths over the vocabulary of all ranks.

    With K columns a share of smoothing K / (K - 1) goes evenly to all of them. The original takes this
    rank's columns for all; without smoothing it is right, and gives the part of the true label.
    """
    group = (args[0] if args else kwargs.get("tp_group")) or parallel_state.get_tensor_model_parallel_group()
    if label_smoothing == 0.0 or group.size() == 1:
        return original(logits, target, label_smoothing, *args, **kwargs)
    columns = logits.shape[-1] * group.size()
    share = label_smoothing * columns / (columns - 1)
    evenly = _mean_loss(logits, columns, group)  # first: the original writes into what it is given
    return (1 - share) * original(logits, target, 0.0, *args, **kwargs) + share * evenly


def _mean_loss(logits: torch.Tensor, columns: int, group: Any) -> torch.Tensor:
    """The mean of the losses of all columns: the log of the sum of exponentials less the mean logit."""

    def total(x: torch.Tensor) -> torch.Tensor:  # over the ranks; each gets the whole gradient back
        reduce = tensor_parallel.reduce_from_tensor_model_parallel_region
        summed: torch.Tensor = reduce(x.sum(-1), **known(reduce, group=group))
        return summed

    top = logits.detach().float().max(-1).values
    torch.distributed.all_reduce(top, op=torch.distributed.ReduceOp.MAX, group=group)
    shifted = logits.float() - top.unsqueeze(-1)
    return total(shifted.exp()).log() - total(shifted) / columns


@around
def own_columns(original: Function, self: Any, labels: torch.Tensor, logits: torch.Tensor) -> Any:
    """Returns `LanguageModule.compute_language_model_loss` that cuts logits of all ranks to this rank's.

    Every loss behind it takes what it is given for the columns of one rank.
    """
    groups = getattr(self, "pg_collection", None)
    group = getattr(groups, "tp", None) or parallel_state.get_tensor_model_parallel_group()
    if group.size() > 1 and logits.shape[-1] == getattr(self, "vocab_size", None):
        scatter = tensor_parallel.scatter_to_tensor_model_parallel_region
        logits = scatter(logits, **known(scatter, group=group))
    return original(self, labels, logits)
