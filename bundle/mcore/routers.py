"""Megatron's routers: the routers of a model, their own replay, and the term that balances experts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.overrides import TorchFunctionMode


def find_routers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the routers of a model chunk in the order of its layers, those of MTP last."""
    return [module for module in model.modules() if isinstance(module, TopKRouter)]


def map_decoder_routers_to_layers(model: torch.nn.Module) -> dict[object, int]:
    """Return a map from the router of each decoder layer of a chunk to the layer, counted over all stages.

    The key is megatron's RouterReplay where the router has one, else the router. The routers of multi-token
    prediction are left out: their own layer numbers are those of other layers (1 in most releases).
    """
    return {
        getattr(router, "router_replay", None) or router: layer.layer_number - 1
        for layer in model.decoder.layers
        for router in find_routers(layer)
    }


def set_megatron_replay(router: torch.nn.Module, routes: torch.Tensor) -> None:
    """Make a router take these experts [t, k] from now on, by `moe_enable_routing_replay` (since 0.16)."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    router.router_replay.set_target_indices(routes)
    router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


def set_group_score_topk(model: torch.nn.Module, score_topk: int) -> None:
    """Make a new model's routers rank groups of experts by the sum of their `score_topk` best scores.

    Megatron sums topk // group_topk of them: that is right for DeepSeek-V3's 8 of 4 groups, and not for V2.
    """
    for router in find_routers(model):
        if router.config.moe_router_topk // router.config.moe_router_group_topk != score_topk:
            router.routing = _GroupScoreTopkRouting(router.routing, score_topk)


class _GroupScoreTopkRouting:
    """A router's choice that scores each group by its `score_topk` best experts."""

    def __init__(self, original: Callable[..., Any], score_topk: int) -> None:
        self._original, self._score_topk = original, score_topk

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _GroupScoreTopkMode(self._score_topk):
            return self._original(*args, **kwargs)


class _GroupScoreTopkMode(TorchFunctionMode):
    """Replaces the only top-k of a router in three dimensions: the best experts of [token, group]."""

    def __init__(self, score_topk: int) -> None:
        super().__init__()
        self._score_topk = score_topk

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.topk, torch.Tensor.topk) and args[0].ndim == 3:
            return function(args[0], self._score_topk, dim=-1)
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class RouterRows:
    """The rows [t] that a router of this rank sees of one micro-batch, in its order.

    `group_index` is the group of tokens with which a row is balanced; padding has the number after the last
    group. `group_tokens` are the tokens of each group over all ranks, float32. `padding_mask` is True where a
    row is not a token; None: nowhere.
    """

    group_index: Tensor
    group_tokens: Tensor
    padding_mask: Tensor | None


class Balancer(Protocol):
    """The source of the routers' balancing terms."""

    def take_current_rows(self, router: object) -> RouterRows | None:
        """Return the rows that this router is about to see; None where nothing is trained."""

    def compute_term(self, rows: RouterRows, logits: Tensor) -> Tensor | None:
        """Return what is added to the loss for these logits [t, experts]; None: nothing."""


def attach_balancing_loss(router: torch.nn.Module, balancer: Balancer) -> None:
    """Make a router train on the balancer's term, and exclude padding from its steering bias.

    Only the gradient sees the term, as with megatron's own: those do not reach the loss function either.
    """
    original: Callable[..., tuple[Tensor, Tensor]] = router.routing

    def routing(logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows = balancer.take_current_rows(router)
        if rows is None or not torch.is_grad_enabled():
            return original(logits, *args, **kwargs)
        term = balancer.compute_term(rows, logits.flatten(0, -2))
        if term is not None:
            logits = _TermGradient.apply(logits, term)
        weights, chosen = original(logits, *args, **kwargs)
        counts = router.local_tokens_per_expert  # of what steers, which megatron has just added to
        if counts is not None and rows.padding_mask is not None:
            counts -= (chosen & rows.padding_mask[:, None]).sum(0)
        return weights, chosen

    router.routing = routing


class _TermGradient(torch.autograd.Function):
    """The logits unchanged; in the backward pass the term has its own gradient, of weight 1."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, term: Tensor) -> Tensor:
        ctx.save_for_backward(term)
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (term,) = ctx.saved_tensors
        return gradient, torch.ones_like(term)
