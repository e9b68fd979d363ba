"""Gradients, from the loss to the optimizer: of shared vocabularies, what divides them, whose norm."""

import math
from collections.abc import Sized
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel

from bundle.mcore import filter_keywords
from bundle.replacements import Function, make_wrapper


@make_wrapper
def smooth_over_all_columns(
    original: Function,
    logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return `vocab_parallel_cross_entropy` that smooths over the vocabulary of all ranks.

    With K columns a share of smoothing K / (K - 1) goes evenly to all of them. The original takes this
    rank's columns for all columns. It is right without smoothing, and so computes the part of the true label.
    """
    group = (args[0] if args else kwargs.get("tp_group")) or parallel_state.get_tensor_model_parallel_group()
    if label_smoothing == 0.0 or group.size() == 1:
        return original(logits, target, label_smoothing, *args, **kwargs)
    columns = logits.shape[-1] * group.size()
    share = label_smoothing * columns / (columns - 1)
    evenly = _compute_uniform_target_loss(
        logits, columns, group
    )  # first: the original writes into what it is given
    return (1 - share) * original(logits, target, 0.0, *args, **kwargs) + share * evenly


def _compute_uniform_target_loss(logits: torch.Tensor, columns: int, group: Any) -> torch.Tensor:
    """Return the mean loss of all columns: the log of the sum of exponentials less the mean logit."""

    def sum_over_columns(
        x: torch.Tensor,
    ) -> torch.Tensor:  # over the ranks; each gets the whole gradient back
        reduce = tensor_parallel.reduce_from_tensor_model_parallel_region
        summed: torch.Tensor = reduce(x.sum(-1), **filter_keywords(reduce, group=group))
        return summed

    top = logits.detach().float().max(-1).values
    torch.distributed.all_reduce(top, op=torch.distributed.ReduceOp.MAX, group=group)
    shifted = logits.float() - top.unsqueeze(-1)
    return sum_over_columns(shifted.exp()).log() - sum_over_columns(shifted) / columns


@make_wrapper
def select_rank_columns(original: Function, self: Any, labels: torch.Tensor, logits: torch.Tensor) -> Any:
    """Return `LanguageModule.compute_language_model_loss` that cuts logits of all ranks to this rank's.

    Every loss that is called next takes its input for the columns of one rank.
    """
    groups = getattr(self, "pg_collection", None)
    group = getattr(groups, "tp", None) or parallel_state.get_tensor_model_parallel_group()
    if group.size() > 1 and logits.shape[-1] == getattr(self, "vocab_size", None):
        scatter = tensor_parallel.scatter_to_tensor_model_parallel_region
        logits = scatter(logits, **filter_keywords(scatter, group=group))
    return original(self, labels, logits)


@make_wrapper
def normalize_grad_output_strides(original: Function, ctx: Any, grad_output: torch.Tensor) -> Any:
    """Return `LinearWithFrozenWeight.backward` whose gradient is one matrix product (to 0.18).

    torch multiplies [s, 1, vocabulary] row by row where the stride of the size-1 dimension is unusual.
    A contiguous gradient reshaped to its own shape is a view with the usual strides.
    """
    return original(ctx, grad_output.reshape(grad_output.shape))


@make_wrapper
def sum_tokens_over_context_ranks(
    original: Function, model: Any, num_tokens: torch.Tensor | None = None
) -> Any:
    """Return `finalize_model_grads` that counts the tokens of all context-parallel ranks (0.12).

    mcore sums the gradients over data and context parallel ranks, but the tokens over data parallel ranks
    only.
    """
    if num_tokens is not None:
        torch.distributed.all_reduce(num_tokens, group=parallel_state.get_context_parallel_group())
    return original(model, num_tokens)


@make_wrapper
def pad_before_embedding_bucket(
    original: Function, self: Any, ddp_config: Any, *args: Any, **kwargs: Any
) -> None:
    """Return `_ParamAndGradBuffer.__init__` that lays a shared embedding out as 0.13 does (0.12).

    The embedding's bucket must start behind padding. In 0.12 it does only where the data-parallel size does
    not divide the end of the bucket before; else it reaches into that bucket. During the call the size is
    therefore a common multiple of the true size and the padding. Buckets that were in place do not move.
    """
    padding = 2**16 if ddp_config.pad_buckets_for_high_nccl_busbw else 128
    owner, name = type(self), "data_parallel_world_size"

    def get_size(buffer: Any) -> int:
        return math.lcm(vars(buffer)[name], padding)

    def set_size(buffer: Any, size: int) -> None:
        vars(buffer)[name] = size

    self.__class__ = type(owner.__name__, (owner,), {name: property(get_size, set_size)})
    try:
        original(self, ddp_config, *args, **kwargs)
    finally:
        self.__class__ = owner


@make_wrapper
def mark_duplicated_weights_unsplit(
    original: Function, self: torch.nn.Module, *args: Any, parallel_mode: str | None, **kwargs: Any
) -> None:
    """Return TELinear's `__init__` that marks no duplicated weight as one rank's share (to 0.16).

    Transformer Engine marks the weight of every linear layer.
    """
    original(self, *args, parallel_mode=parallel_mode, **kwargs)
    if parallel_mode == "duplicated":
        for parameter in self.parameters():
            parameter.tensor_model_parallel = False  # type: ignore[attr-defined]


@make_wrapper
def mark_expert_weights_as_split(
    original: Function, self: torch.nn.Module, *args: Any, parallel_mode: str | None, **kwargs: Any
) -> None:
    """Return TEGroupedLinear's `__init__` that marks every expert's weights as one rank's share (to 0.18).

    They are a share, whether experts are split or distributed. Transformer Engine marks them itself to 2.12.
    A bias behind a row-parallel product is whole on every rank.
    """
    original(self, *args, parallel_mode=parallel_mode, **kwargs)
    for name, parameter in self.named_parameters(recurse=False):
        if parallel_mode == "column" or (parallel_mode == "row" and name.startswith("weight")):
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


@make_wrapper
def skip_empty_quantization(original: Function, model_params: Sized, *args: Any, **kwargs: Any) -> Any:
    """Return `quantize_param_shard` that does nothing where there are no FP8 parameters.

    Every optimizer step calls it. Without Transformer Engine the original raises before it looks for
    parameters.
    """
    return original(model_params, *args, **kwargs) if len(model_params) else None


@make_wrapper
def copy_params_to_hybrid_optimizer(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Return `DistributedOptimizer._copy_model_params_to_main_params` that fills all stepped copies.

    The original returns early where the inner optimizer is a HybridDeviceOptimizer. So it runs once more
    without that optimizer, which fills this rank's fp32 shards; then the inner optimizer's copies are filled.
    """
    original(self, *args, **kwargs)
    hybrid = self.optimizer
    fsdp = ("use_megatron_fsdp", "use_custom_fsdp")
    if not hasattr(hybrid, "param_to_inner_param") or any(getattr(self.ddp_config, f, False) for f in fsdp):
        return
    self.optimizer = None
    try:
        original(self, *args, **kwargs)
    finally:
        self.optimizer = hybrid
    with torch.no_grad():
        for parameter, stepped in hybrid.param_to_inner_param.items():
            if stepped is not parameter:
                stepped.copy_(parameter)


@make_wrapper
def skip_params_without_fp32_copy(original: Function, self: Any) -> None:
    """Return `HybridDeviceOptimizer._update_fp32_params_by_new_state` for parameters that are fp32 too.

    Such parameters are stepped themselves. They have no fp32 copy, which the original looks up.
    """
    states = self.state
    self.state = {p: state for p, state in states.items() if p in self.param_to_fp32_param}
    try:
        original(self)
    finally:
        self.state = states
