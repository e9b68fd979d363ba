"""Replayed expert choices: are they taken, and are they taken again when a layer is recomputed?"""

from typing import Any

import torch

from bundle.mcore import context, experts
from bundle.mcore.groups import Groups
from bundle.verification.bench import Bench
from bundle.verification.numbers import Numbers, gap, gradients, run
from bundle.verification.tiny import EXPERTS, chunk, rows, texts

_FULL = {"granularity": "full"}
_TOKENS, _TOPK, _MICRO_BATCHES = 32, 2, 2


def replay(bench: Bench) -> float:
    """The share of tokens whose experts are not those asked for; then full recomputation against none."""
    with bench.layout() as groups:
        (kept, missed), (recomputed, missed_too) = (_replayed(bench, groups, how) for how in (None, _FULL))
        return max(missed, missed_too, gap(recomputed, kept))


def _replayed(bench: Bench, groups: Groups, how: dict[str, str] | None) -> tuple[Numbers, float]:
    """Loss and gradients under given routes, and the largest share of tokens that a router sent elsewhere."""
    model = chunk(bench, groups, EXPERTS, recompute=how)
    routes = context.Routes(replay=True)
    shares: list[float] = []

    def compare(router: torch.nn.Module, _args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        chosen = output[1]
        asked = torch.zeros_like(chosen).scatter(1, wanted[router], True)
        shares.append((chosen != asked).any(-1).float().mean().item())

    wanted = {router: _routes(i, 0).to(bench.device) for i, router in enumerate(experts.routers(model))}
    for router, given in wanted.items():
        routes.give(router, given)
        router.register_forward_hook(compare)
    with context.routes.set(routes):
        loss = run(model, rows(bench, groups, torch.stack(texts((16, 16))), torch.ones(2, 16)))
        loss.backward()
    return {"loss": loss.detach(), **gradients(model, groups)}, max(shares)


def native_recompute(bench: Bench) -> float:
    """mcore's own replay with two micro-batches in flight, recomputed against kept."""
    with bench.layout() as groups:
        tokens = torch.stack(texts((16,) * 2 * _MICRO_BATCHES))
        seen: list[Numbers] = []
        for how in (None, _FULL):
            model = chunk(bench, groups, EXPERTS, {"moe_enable_routing_replay": True}, recompute=how)
            routers = experts.routers(model)
            losses = []
            for number, part in enumerate(tokens.split(2)):
                for index, router in enumerate(routers):
                    experts.give_native_routes(router, _routes(index, number).to(bench.device))
                losses.append(run(model, rows(bench, groups, part, torch.ones(2, 16))))
            for loss in losses:
                loss.backward()
            seen.append({"loss": torch.stack(losses).detach(), **gradients(model, groups)})
        return gap(seen[1], seen[0])


def _routes(router: int, micro_batch: int) -> torch.Tensor:
    """Distinct experts for every token, others for every router and micro-batch; [t, k]."""
    generator = torch.Generator().manual_seed(10 * micro_batch + router)
    return torch.rand(_TOKENS, EXPERTS["num_experts"], generator=generator).topk(_TOPK).indices
