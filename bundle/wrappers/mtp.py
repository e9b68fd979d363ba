"""Multi-token prediction: the roll to the next token, what its loss is divided by, and when it runs."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state

from bundle.mcore import mtp, packed


def roll_over_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `roll_tensor` that rolls the sequence of all context-parallel ranks (below 0.14).

    Rank r holds chunks r and 2 cp - 1 - r; the token after a chunk is the first of the next one.
    """

    @functools.wraps(original)
    def roll_tensor(tensor: torch.Tensor, shifts: int = -1, dims: int = -1) -> Any:
        group = parallel_state.get_context_parallel_group()
        rolled, count = original(tensor, shifts, dims)
        rank, ranks = group.rank(), group.size()
        if ranks == 1:
            return rolled, count
        half = tensor.shape[-1] // 2
        mine = tensor[..., [0, half]].contiguous()  # the first tokens of both chunks
        firsts = [torch.empty_like(mine) for _ in range(ranks)]
        torch.distributed.all_gather(firsts, mine, group=group)
        rolled[..., half - 1] = firsts[rank + 1][..., 0] if rank + 1 < ranks else mine[..., 1]
        rolled[..., -1] = firsts[rank - 1][..., 1] if rank > 0 else 0
        return rolled, _mean_over(group, rolled.sum()) if rolled.is_floating_point() else rolled.sum()

    return roll_tensor


def count_over_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `roll_tensor` whose token count is that of a rank on average (0.14 and later).

    The count comes with the rolled loss mask. What is divided by it is averaged over the ranks later,
    and is right only if all of them divide by the same number.
    """

    @functools.wraps(original)
    def roll_tensor(
        tensor: Any, shifts: int = -1, dims: int = -1, cp_group: Any = None, **kwargs: Any
    ) -> Any:
        rolled, count = original(tensor, shifts, dims, cp_group, **kwargs)
        if cp_group is None or cp_group.size() == 1 or tensor is None or not tensor.is_floating_point():
            return rolled, count  # token ids, positions, labels: nobody counts them
        return rolled, _mean_over(cp_group, count)

    return roll_tensor


def count_mask_over_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `process_mtp_loss` whose token count before the roll is a rank's average too (0.17 and later).

    It scales the loss by that count over the count after the roll. The token that rolling removes is
    missing on one rank only, so that the ratio of one rank is not that of the sequence.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def process_mtp_loss(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        given = call.arguments
        group = given.get("cp_group")
        if given["labels"] is not None and group is not None and group.size() > 1:
            mask = given.get("loss_mask")
            mask = torch.ones_like(given["labels"]) if mask is None else mask
            given["loss_mask"] = _CountedMask.of(mask.float(), group)
        return original(*call.args, **call.kwargs)

    return process_mtp_loss


def as_heavy_as_before(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `roll_tensor` whose rolled loss mask has the sum that it had before (below 0.17).

    The sum of losses behind it then weighs what the main loss weighs. A mean is what it was, the count
    of tokens being weighted too.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def roll_tensor(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        rolled, count = original(tensor, *args, **kwargs)
        if tensor is None or not tensor.is_floating_point():
            return rolled, count  # token ids, positions, labels
        group = signature.bind(tensor, *args, **kwargs).arguments.get("cp_group")
        if "cp_group" not in signature.parameters:  # to 0.13
            group = parallel_state.get_context_parallel_group()
        sums = torch.stack([tensor.sum(), rolled.sum()])
        if group is not None and group.size() > 1:
            torch.distributed.all_reduce(sums, group=group)
        before, after = sums
        weight = torch.where(after > 0, before / after.clamp(min=torch.finfo(after.dtype).tiny), 1.0)
        return rolled * weight, count * weight

    return roll_tensor


def rolled_by_one_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `_roll_tensor_packed_seq` that rolls where the sequences lie, padding included, all at once.

    Megatron's cuts at their lengths without padding, and so rolls tokens across sequences; and it reads every
    boundary back from the device, sequence by sequence.
    """

    @functools.wraps(original)
    def _roll_tensor_packed_seq(
        tensor: torch.Tensor, shifts: int, dims: int, packed_seq_params: Any, cp_group: Any = None
    ) -> Any:
        boundaries = packed_seq_params.cu_seqlens_q_padded
        if boundaries is None:
            boundaries = packed_seq_params.cu_seqlens_q
        if boundaries is None or shifts != -1 or dims not in (-1, tensor.dim() - 1):
            return original(tensor, shifts, dims, packed_seq_params, cp_group)  # it says what is wrong
        after = packed.rolled(tensor, boundaries, cp_group)
        return after, after.sum()

    return _roll_tensor_packed_seq


def no_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `TransformerConfig.__post_init__` for which no layers of prediction are no prediction.

    mcore asks `mtp_num_layers is not None`, and with 0 wants labels even for logits.
    """

    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        if self.mtp_num_layers == 0:
            self.mtp_num_layers = None
        original(self)

    return __post_init__


def only_with_labels(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `GPTModel.forward` that predicts further tokens only where there are labels to compare with.

    Without, mcore fails (to 0.16), runs the layers for nothing (0.17, 0.18), or trains them on the
    input, in evaluation too (0.19). Inference has its own use of these layers and is left alone.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        inference = given.get("inference_context") or given.get("inference_params")
        if given.get("labels") is not None or inference is not None or not self.config.mtp_num_layers:
            return original(self, *args, **kwargs)
        with mtp.left_out(self):
            return original(self, *args, **kwargs)

    return forward


class _CountedMask(torch.Tensor):
    """A loss mask whose `sum()` is the average of its context-parallel group; what is made of it is plain."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    count: torch.Tensor

    @classmethod
    def of(cls, mask: torch.Tensor, group: Any) -> "_CountedMask":
        counted: _CountedMask = mask.as_subclass(cls)
        counted.count = _mean_over(group, mask.sum())
        return counted

    def sum(self) -> torch.Tensor:  # type: ignore[override]
        return self.count


def _mean_over(group: Any, count: torch.Tensor) -> torch.Tensor:
    """Returns `count`, averaged over the ranks of the group: the same number on all of them."""
    total = count.detach().float().clone()
    torch.distributed.all_reduce(total, group=group)
    return total / group.size()
