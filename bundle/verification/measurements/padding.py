"""Routers that are told which rows are padding, against routers that are given the other rows only."""

from collections.abc import Mapping
from typing import Any

import torch

from bundle.mcore import routers
from bundle.mcore.groups import Groups
from bundle.verification.bench import Bench
from bundle.verification.numbers import gap, worst
from bundle.verification.tiny import EXPERTS, chunk

_EXPERTS, _TOPK, _HIDDEN = 8, 2, 64  # of EXPERTS
_BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}
_BALANCED_OVER_ALL = _BALANCED | {"moe_router_load_balancing_type": "global_aux_loss"}
_BIASED = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}


def expert_bias(bench: Bench) -> float:
    """How many tokens each expert is said to have: more tokens than experts, and just as many."""
    gaps = []
    with bench.layout() as groups:
        for tokens in (3 * _EXPERTS, _EXPERTS):
            rows = _rows(bench, tokens)
            padded = torch.arange(tokens, device=bench.device) % 4 == 1
            told, given = (_router(bench, groups, _BIASED) for _ in range(2))
            told(rows[:, None], padding_mask=padded[:, None])
            given(rows[~padded][:, None])
            counts = (router.local_tokens_per_expert.clone() for router in (told, given))
            gaps.append(gap(*({"counts": count} for count in counts)))
    return worst(gaps)


def own_count(bench: Bench) -> float:
    """The balancing gradient of a rank under a mask without any padding, against that without a mask."""
    with bench.layout(tp=2, ep=2) as groups:
        rows = _rows(bench, 24)[:, None]
        seen = []
        for mask in (torch.zeros(24, 1, dtype=torch.bool, device=bench.device), None):
            router = _router(bench, groups, _BALANCED)
            router(rows, padding_mask=mask)[0].sum().mul(0.0).backward()
            seen.append({"gradient": router.weight.grad})
        return gap(*seen)


def global_loss(bench: Bench) -> float:
    """The gradient of the global loss of micro-batches of 12, 20 and 5 tokens, against its formula."""
    parts = _rows(bench, 37).split((12, 20, 5))
    with bench.layout() as groups:
        router = _router(bench, groups, _BALANCED_OVER_ALL | {"calculate_per_token_loss": False})
        for part in parts:
            router(part[:, None])[0].sum().mul(0.0).backward()
        weight = router.weight.detach().clone().requires_grad_()
        counts = torch.zeros(_EXPERTS, device=bench.device)
        for part in parts:
            scores = (part @ weight.t()).softmax(-1)
            counts += torch.zeros_like(scores).scatter(1, scores.topk(_TOPK).indices, 1.0).sum(0)
            (_EXPERTS * (counts / counts.sum() * scores.mean(0)).sum()).backward()
        return gap({"gradient": router.weight.grad}, {"gradient": weight.grad})


def _router(bench: Bench, groups: Groups, options: Mapping[str, Any]) -> torch.nn.Module:
    """The first router of a tiny model, the same weights every time."""
    return routers.of_model(chunk(bench, groups, EXPERTS, options))[0]


def _rows(bench: Bench, tokens: int) -> torch.Tensor:
    """Hidden states [tokens, h], the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(tokens, _HIDDEN, generator=generator).to(bench.device)
