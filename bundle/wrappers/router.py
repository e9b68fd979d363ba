"""Expert choice: by the router itself, or as `context.choices` has it; and mcore's own replay, recomputed."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bundle.mcore import context
from bundle.wrappers import Function, around


@around
def choice(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns `TopKRouter.routing` that takes its experts from `context.choices`, where that is set.

    The gradient still flows through the scores of the experts that are used.
    """
    choices = context.choices.get()
    if choices is None:
        return original(self, *args, **kwargs)
    with _ExpertChoice(self, choices):
        return original(self, *args, **kwargs)


@around
def choice_in_replay(original: Function, self: Any, scores: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Returns `RouterReplay.get_replay_topk` that takes its experts from `context.choices`, where set.

    It is megatron's own way to the choice (0.16 and later), and its object stands for its router.
    """
    values, own = original(self, scores, *args, **kwargs)
    choices = context.choices.get()
    chosen = own if choices is None else choices.choose(self, own)
    return (values, own) if chosen is own else (scores.gather(1, chosen), chosen)


@around
def own_routes_on_recompute(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns `RouterReplay.get_replay_topk` that recomputes a micro-batch with that micro-batch's routes.

    mcore keeps them in a queue, which it reads only under an action that no schedule sets; under
    REPLAY_FORWARD a recomputation takes the routes of the latest micro-batch.
    """
    action = self.router_replay_action
    if action is None or action.name != "REPLAY_FORWARD" or not context.in_backward():
        return original(self, *args, **kwargs)
    self.router_replay_action = type(action).REPLAY_BACKWARD
    try:
        return original(self, *args, **kwargs)
    finally:
        self.router_replay_action = action


class _ExpertChoice(TorchFunctionMode):
    """Answers for the one top-k of a router that chooses the experts, and lets all others through.

    It is the first over [tokens, experts] with k experts. Before it, group-limited routing looks for the
    best groups (over [tokens, groups, experts of a group], then over [tokens, groups]); after it, the
    auxiliary losses and the expert capacity (over the tokens) choose again.
    """

    def __init__(self, router: Any, choices: context.Choices) -> None:
        super().__init__()
        self.router, self.choices = router, choices
        self.made = False
        self._scores: torch.Tensor | None = None  # of all experts, before groups are masked with -inf
        self._groups = False  # the next top-k is the choice of groups

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.made or function not in (torch.topk, torch.Tensor.topk):
            return function(*args, **kwargs)
        scores, k, dim = _topk_arguments(*args, **kwargs)
        if scores.ndim == 3:
            self._scores, self._groups = scores.flatten(1), True
            return function(*args, **kwargs)
        if self._groups:
            self._groups = False
            return function(*args, **kwargs)
        experts = (self.router.topk, self.router.config.num_moe_experts)
        if scores.ndim != 2 or dim == 0 or (k, scores.shape[1]) != experts:
            return function(*args, **kwargs)
        self.made = True
        values, own = function(*args, **kwargs)
        chosen = self.choices.choose(self.router, own)
        if chosen is own:
            return values, own
        # Not from the masked scores: a given expert outside the router's own groups would have -inf.
        return (scores if self._scores is None else self._scores).gather(1, chosen), chosen


def _topk_arguments(
    input: torch.Tensor, k: int, dim: int = -1, *_: Any, **__: Any
) -> tuple[torch.Tensor, int, int]:
    return input, k, dim
