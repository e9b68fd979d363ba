"""Multi-token prediction: its roll, what its loss is divided by, when it runs, and its recomputation."""

import copy
import functools
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel

from bundle.mcore import can_take_keyword, filter_keywords, mtp, packed_sequences
from bundle.replacements import Function, bind_passed_arguments, make_wrapper


@make_wrapper
def roll_over_context_ranks(
    original: Function, tensor: torch.Tensor, shifts: int = -1, dims: int = -1
) -> Any:
    """Return `roll_tensor` that rolls the sequence of all context-parallel ranks (below 0.14).

    Rank r holds chunks r and 2 cp - 1 - r; the token after a chunk is the first of the next one.
    """
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return original(tensor, shifts, dims)
    row = torch.arange(2, device=tensor.device) * (tensor.shape[-1] * group.size())
    rolled = packed_sequences.roll_packed(tensor, row, group)
    return rolled, _average_over_group(group, rolled.sum()) if rolled.is_floating_point() else rolled.sum()


@make_wrapper
def average_rolled_token_count(
    original: Function, tensor: Any, shifts: int = -1, dims: int = -1, cp_group: Any = None, **kwargs: Any
) -> Any:
    """Return `roll_tensor` whose token count is the mean over the ranks (0.14 and later).

    The count comes with the rolled loss mask and divides a loss. That loss is averaged over the ranks later,
    and is right only if all of them divide by the same number.
    """
    rolled, count = original(tensor, shifts, dims, cp_group, **kwargs)
    if cp_group is None or cp_group.size() == 1 or tensor is None or not tensor.is_floating_point():
        return rolled, count  # token ids, positions, labels: nobody counts them
    return rolled, _average_over_group(cp_group, count)


@make_wrapper
def average_cp_token_count(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Return `process_mtp_loss` whose token count before the roll is a mean too (0.17 and later).

    The original scales the loss by that count over the count after the roll. The token that rolling removes
    is missing on one rank only, so that the ratio of one rank is not that of the sequence.
    """
    call = bind_passed_arguments(original, *args, **kwargs)
    arguments = call.arguments
    group, labels, mask = arguments.get("cp_group"), arguments["labels"], arguments.get("loss_mask")
    if labels is not None and group is not None and group.size() > 1:
        mask = torch.ones_like(labels) if mask is None else mask
        arguments["loss_mask"] = _AveragedCountMask.from_mask_with_mean_count(mask.float(), group)
    return original(*call.args, **call.kwargs)


@make_wrapper
def rescale_rolled_mask_sum(original: Function, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Return `roll_tensor` whose rolled loss mask has the sum that it had before (below 0.17).

    The sum of the MTP losses then has the weight of the main loss. A mean does not change, since the count
    of tokens is weighted too.
    """
    rolled, count = original(tensor, *args, **kwargs)
    if tensor is None or not tensor.is_floating_point():
        return rolled, count  # token ids, positions, labels
    if can_take_keyword(original, "cp_group"):
        group = bind_passed_arguments(original, tensor, *args, **kwargs).arguments.get("cp_group")
    else:  # to 0.13
        group = parallel_state.get_context_parallel_group()
    sums = torch.stack([tensor.sum(), rolled.sum()])
    if group is not None and group.size() > 1:
        torch.distributed.all_reduce(sums, group=group)
    before, after = sums
    weight = torch.where(after > 0, before / after.clamp(min=torch.finfo(after.dtype).tiny), 1.0)
    return rolled * weight, count * weight


@make_wrapper
def roll_packed_by_gather(
    original: Function,
    tensor: torch.Tensor,
    shifts: int,
    dims: int,
    packed_seq_params: Any,
    cp_group: Any = None,
) -> Any:
    """Return `_roll_tensor_packed_seq` that rolls all sequences at once, by their padded boundaries.

    Megatron's function cuts at their lengths without padding, and so rolls tokens across sequences. It also
    reads every boundary back from the device, sequence by sequence.
    """
    boundaries = packed_seq_params.cu_seqlens_q_padded
    if boundaries is None:
        boundaries = packed_seq_params.cu_seqlens_q
    if boundaries is None or shifts != -1 or dims not in (-1, tensor.dim() - 1):
        return original(tensor, shifts, dims, packed_seq_params, cp_group)  # it says what is wrong
    after = packed_sequences.roll_packed(tensor, boundaries, cp_group)
    return after, after.sum()


@make_wrapper
def disable_empty_mtp(original: Function, self: Any) -> None:
    """Return `TransformerConfig.__post_init__` that takes zero MTP layers for no MTP.

    mcore checks `mtp_num_layers is not None`, and with 0 needs labels even for logits.
    """
    if self.mtp_num_layers == 0:
        self.mtp_num_layers = None
    original(self)


@make_wrapper
def disable_mtp_without_labels(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return `GPTModel.forward` that predicts further tokens only where there are labels to compare with.

    Without, mcore fails (to 0.16), runs the layers for nothing (0.17, 0.18), or trains them on the
    input, in evaluation too (0.19). Inference uses these layers in its own way and is not changed.
    Callers that pass separate labels in `mtp_kwargs`, as forks do (slime, miles), are not changed either.
    """
    arguments = bind_passed_arguments(original, self, *args, **kwargs).arguments
    inference = arguments.get("inference_context") or arguments.get("inference_params")
    labels = arguments.get("labels") is not None or arguments.get("mtp_kwargs")
    if labels or inference is not None or not self.config.mtp_num_layers:
        return original(self, *args, **kwargs)
    with mtp.disable_mtp(self):
        return original(self, *args, **kwargs)


@make_wrapper
def bind_non_tensor_arguments(
    original: Function, self: Any, forward_func: Function, *args: Any, **kwargs: Any
) -> Any:
    """Return `MultiTokenPredictionLayer._checkpointed_forward` that takes packed sequences (0.16, 0.17).

    mcore hands every argument to `save_for_backward`, which takes tensors and None only.
    """
    objects = {k: v for k, v in kwargs.items() if v is not None and not torch.is_tensor(v)}
    tensors = {k: v for k, v in kwargs.items() if k not in objects}

    def forward(*values: Any, **named: Any) -> Any:  # mcore may pass the tensors on without their names
        rest = dict(zip(tensors, values[len(args) :], strict=False))
        return forward_func(*values[: len(args)], **rest, **named, **objects)

    return original(self, forward, *args, **tensors)


@make_wrapper
def bind_padding_mask(
    original: Function, self: Any, *args: Any, padding_mask: Any = None, **kwargs: Any
) -> Any:
    """Return `MultiTokenPredictionLayer._checkpointed_forward` that takes a padding mask (0.18).

    Its caller always passes one and its callee takes one, but its signature lacks it.
    """
    bound = copy.copy(self)  # the same parameters; only its forward function differs
    bound._proj_and_transformer_layer = functools.partial(
        self._proj_and_transformer_layer, padding_mask=padding_mask
    )
    return original(bound, *args, **kwargs)


@make_wrapper
def scatter_embeddings(
    original: Function, self: Any, *args: Any, embedding: Any = None, **kwargs: Any
) -> Any:
    """Return `MultiTokenPredictionBlock.forward` that scatters embeddings as the model's input is.

    An embedding may leave the whole sequence on every rank, so that images can be put into it. It does so for
    the MTP layers too, but their hidden states are scattered over the sequence-parallel ranks.
    """
    if not self.config.sequence_parallel or getattr(embedding, "scatter_to_sequence_parallel", True):
        return original(self, *args, embedding=embedding, **kwargs)
    scatter = tensor_parallel.scatter_to_sequence_parallel_region
    group = filter_keywords(scatter, group=getattr(embedding, "tp_group", None))

    @functools.wraps(embedding)
    def embed(*ids: Any, **named: Any) -> Any:
        return scatter(embedding(*ids, **named), **group)

    return original(self, *args, embedding=embed, **kwargs)


class _AveragedCountMask(torch.Tensor):
    """A loss mask whose `sum()` is the average of its context-parallel group; what is made of it is plain."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    count: torch.Tensor

    @classmethod
    def from_mask_with_mean_count(cls, mask: torch.Tensor, group: Any) -> "_AveragedCountMask":
        counted: _AveragedCountMask = mask.as_subclass(cls)
        counted.count = _average_over_group(group, mask.sum())
        return counted

    def sum(self) -> torch.Tensor:  # type: ignore[override]
        return self.count


def _average_over_group(group: Any, count: torch.Tensor) -> torch.Tensor:
    """Return the mean of `count` over the ranks of the group, the same number on all of them."""
    total = count.detach().float().clone()
    torch.distributed.all_reduce(total, group=group)
    return total / group.size()
