"""Mixture of experts: the weight of its losses, what is counted and what is padding, and a cpu's needs.

And the choice of experts: by the router itself, or as `context.router_choices` has it; and mcore's replay.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils
from torch.overrides import TorchFunctionMode

from bundle.mcore import context
from bundle.replacements import Function, make_wrapper


def scale_forward_step_token_losses(original: Function) -> Function:
    """Return the schedules' forward step whose losses per token count for all ranks of a micro-batch.

    Routers weigh them by the tokens of one rank, and all gradients are divided by the tokens of all ranks.
    """
    return _scale_aux_losses(
        original, lambda config: config.calculate_per_token_loss, _count_tensor_context_ranks
    )


def scale_cp_mean_aux_losses(original: Function) -> Function:
    """Return the schedules' forward step whose mean losses count for all context-parallel ranks (to 0.15).

    Gradients are averaged over those ranks, and each rank has its part of the loss.
    """
    return _scale_aux_losses(
        original,
        lambda config: not config.calculate_per_token_loss,
        parallel_state.get_context_parallel_world_size,
    )


def _count_tensor_context_ranks() -> int:
    return int(parallel_state.get_tensor_and_context_parallel_group().size())


def _scale_aux_losses(
    original: Function, applies: Callable[[Any], bool], factor: Callable[[], int]
) -> Function:
    """Return the original, after which the loss scale that it has set is multiplied by `factor()`.

    From 0.14 the inner of two functions is wrapped.
    """
    inner = original.__globals__.get("forward_step_calc_loss")
    if inner is not None and original.__name__ != inner.__name__:
        return original
    position = list(inspect.signature(original).parameters).index("config")

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        config = kwargs["config"] if "config" in kwargs else args[position]
        if getattr(config, "num_moe_experts", None) is not None and applies(config):
            moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale.mul_(factor())
        return result

    return step


@make_wrapper
def scale_token_count_by_batch(
    original: Function,
    self: Any,
    probs: Any,
    scores: Any,
    routing_map: Any,
    seq_length: int,
    bsz: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return `TopKRouter._apply_seq_aux_loss` whose loss per token counts for all rows (0.16 to 0.18).

    The original passes on the token count of a single row as the weight.
    """
    attach = self.attach_and_log_load_balancing_loss

    @functools.wraps(attach)
    def scale_count_to_batch(*positional: Any, valid_token_count: Any, **keywords: Any) -> Any:
        return attach(*positional, valid_token_count=valid_token_count * bsz, **keywords)

    self.attach_and_log_load_balancing_loss = scale_count_to_batch
    try:
        return original(self, probs, scores, routing_map, seq_length, bsz, *args, **kwargs)
    finally:
        del self.attach_and_log_load_balancing_loss


@make_wrapper
def keep_float32_counts(original: Function, self: Any) -> None:
    """Return `TopKRouter._maintain_float32_expert_bias` that keeps the counts in float32 as well.

    The wrapper for mixed precision makes them bf16, which cannot hold 257. It runs before each forward pass.
    """
    original(self)
    counts = getattr(self, "local_tokens_per_expert", None)
    if counts is not None and counts.dtype != torch.float32:
        counts.data = counts.data.to(torch.float32)


_is_window_loss = context.ProcessWideOverride(False)


@make_wrapper
def broadcast_padding_mask(
    original: Function, self: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None
) -> Any:
    """Return `TopKRouter._apply_expert_bias` that takes the mask [t] for every expert of the map [t, e]."""
    if padding_mask is not None and padding_mask.ndim == 1:
        padding_mask = padding_mask.unsqueeze(-1)
    return original(self, routing_map, padding_mask=padding_mask)


@make_wrapper
def clone_before_all_reduce(original: Function, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return `reduce_from_tensor_model_parallel_region`, as the routers see it, that leaves its input alone.

    The original sums over the ranks in place, and the caller reads its input afterwards as its own value.
    """
    return original(tensor.clone(), *args, **kwargs)


@make_wrapper
def enable_expert_count_rescaling(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Return `TopKRouter._apply_global_aux_loss` in which `rescale_global_loss_counts` is active."""
    with _is_window_loss.set(True):
        return original(*args, **kwargs)


@make_wrapper
def rescale_global_loss_counts(
    original: Function,
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: Any,
    topk: int,
    *args: Any,
    **kw: Any,
) -> Any:
    """Return `switch_load_balancing_loss_func`, as the routers see it, for counts of other tokens.

    The counts of the global loss are an average over the micro-batches so far, but are divided by the tokens
    of the current one. They are scaled to as many choices, [tokens x topk], as the division expects.
    """
    if _is_window_loss.get():
        share = tokens_per_expert / tokens_per_expert.sum().clamp(min=1)
        tokens_per_expert = share * (total_num_tokens * topk)
    return original(probs, tokens_per_expert, total_num_tokens, topk, *args, **kw)


@make_wrapper
def convert_cpu_splits_to_numpy(
    original: Function, tensor: Any, as_numpy: bool = False, *args: Any, **kwargs: Any
) -> Any:
    """Return `maybe_move_tensor_to_cpu` that converts a tensor which is on the cpu already to numbers.

    The original converts only tensors that it has moved, and the all-to-all needs its split sizes as numbers.
    """
    moved = original(tensor, as_numpy, *args, **kwargs)
    return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved


def disable_te_router_gemm(original: Any) -> None:
    """Return None for `te_general_gemm`, as the router expects without Transformer Engine.

    The router compares the name with None, and without Transformer Engine the name is not bound.
    """


@make_wrapper
def detach_dispatcher_tensors(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return `MoELayer.forward` whose token dispatcher keeps no part of the autograd graph.

    The dispatcher keeps the router's probabilities until its next forward pass. They keep the leaves of the
    graph of a recomputation alive: the input of the layer and the gradient of that input, for every MoE
    layer.
    """
    output = original(self, *args, **kwargs)
    dispatcher = self.token_dispatcher
    for holder in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
        attributes = vars(holder) if holder is not None else {}
        attributes.update({k: v.detach() for k, v in attributes.items() if _has_grad_fn(v)})
    return output


@make_wrapper
def skip_sort_of_sorted_tokens(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return a step of `MoEAlltoAllTokenDispatcher` that does not sort tokens which are in order already.

    If a rank has all experts, its tokens are in the order of experts before the step. The step sorts only
    where `num_local_experts` is above 1, so the wrapper sets it to 1 for the step.
    """
    if self.tp_size * self.ep_size > 1:
        return original(self, *args, **kwargs)
    count, self.num_local_experts = self.num_local_experts, 1
    try:
        return original(self, *args, **kwargs)
    finally:
        self.num_local_experts = count


def _has_grad_fn(value: Any) -> bool:
    return torch.is_tensor(value) and value.grad_fn is not None


@make_wrapper
def replay_recorded_routes(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return `TopKRouter.routing` that takes its experts from `context.router_choices`, where that is set.

    The gradient still flows through the scores of the experts that are used.
    """
    choices = context.router_choices.get()
    if choices is None:
        return original(self, *args, **kwargs)
    with _RouteReplayMode(self, choices):
        return original(self, *args, **kwargs)


@make_wrapper
def override_native_replay(
    original: Function, self: Any, scores: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Return `RouterReplay.get_replay_topk` that takes its experts from `context.router_choices`, where set.

    It is megatron's own replay (0.16 and later). The object identifies its router.
    """
    values, router_choice = original(self, scores, *args, **kwargs)
    choices = context.router_choices.get()
    chosen = router_choice if choices is None else choices.choose(self, router_choice)
    return (values, router_choice) if chosen is router_choice else (scores.gather(1, chosen), chosen)


@make_wrapper
def keep_routes_on_recompute(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return `RouterReplay.get_replay_topk` that recomputes a micro-batch with that micro-batch's routes.

    mcore keeps them in a queue, which it reads only under an action that no schedule sets; under
    REPLAY_FORWARD a recomputation takes the routes of the latest micro-batch.
    """
    action = self.router_replay_action
    if action is None or action.name != "REPLAY_FORWARD" or not context.is_in_backward():
        return original(self, *args, **kwargs)
    self.router_replay_action = type(action).REPLAY_BACKWARD
    try:
        return original(self, *args, **kwargs)
    finally:
        self.router_replay_action = action


class _RouteReplayMode(TorchFunctionMode):
    """Answers for the one top-k of a router that chooses the experts, and lets all others through.

    It is the first over [tokens, experts] with k experts. Before it, group-limited routing looks for the
    best groups (over [tokens, groups, experts of a group], then over [tokens, groups]); after it, the
    auxiliary losses and the expert capacity (over the tokens) choose again.
    """

    def __init__(self, router: Any, choices: context.RouterChoices) -> None:
        super().__init__()
        self.router, self.choices = router, choices
        self.is_done = False
        self._scores: torch.Tensor | None = None  # of all experts, before groups are masked with -inf
        self._expects_groups = False  # the next top-k is the choice of groups

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_done or function not in (torch.topk, torch.Tensor.topk):
            return function(*args, **kwargs)
        scores, k, dim = _bind_topk_arguments(*args, **kwargs)
        if scores.ndim == 3:
            self._scores, self._expects_groups = scores.flatten(1), True
            return function(*args, **kwargs)
        if self._expects_groups:
            self._expects_groups = False
            return function(*args, **kwargs)
        experts = (self.router.topk, self.router.config.num_moe_experts)
        if scores.ndim != 2 or dim == 0 or (k, scores.shape[1]) != experts:
            return function(*args, **kwargs)
        self.is_done = True
        values, router_choice = function(*args, **kwargs)
        chosen = self.choices.choose(self.router, router_choice)
        if chosen is router_choice:
            return values, router_choice
        # Not from the masked scores: a given expert outside the router's own groups would have -inf.
        return (scores if self._scores is None else self._scores).gather(1, chosen), chosen


def _bind_topk_arguments(
    input: torch.Tensor, k: int, dim: int = -1, *_: Any, **__: Any
) -> tuple[torch.Tensor, int, int]:
    return input, k, dim
