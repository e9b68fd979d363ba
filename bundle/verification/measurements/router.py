"""Replayed expert choices: are they taken, and are they taken again when a layer is recomputed?"""

from typing import Any

import torch

from bundle.mcore import context, routers
from bundle.mcore.groups import Groups
from bundle.verification.bench import Bench
from bundle.verification.numbers import Numbers, gap, gradients, run, worst
from bundle.verification.tiny import EXPERTS, chunk, rows, texts

_FULL = {"granularity": "full"}
_TOKENS, _TOPK, _MICRO_BATCHES = 32, 2, 2


def replay(bench: Bench) -> float:
    """The share of tokens whose experts are not those asked for; then full recomputation against none."""
    with bench.layout() as groups:
        (kept, missed), (recomputed, missed_too) = (_replayed(bench, groups, how) for how in (None, _FULL))
        return worst([missed, missed_too, gap(recomputed, kept)])


def _replayed(bench: Bench, groups: Groups, how: dict[str, str] | None) -> tuple[Numbers, float]:
    """Loss and gradients under given routes, and the largest share of tokens that a router sent elsewhere.

    Every fourth token is left to the router, which must keep the k best of its scores.
    """
    model = chunk(bench, groups, EXPERTS, recompute=how, router_replay=True)
    layers = routers.of_layers(model)
    wanted = {layer: _routes(layer, 0).to(bench.device) for layer in layers.values()}
    given = torch.arange(_TOKENS, device=bench.device) % 4 > 0
    shares: list[float] = []

    def compare(router: torch.nn.Module, args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        best = router.gating(args[0]).view(_TOKENS, -1).topk(_TOPK).indices
        asked = torch.where(given[:, None], wanted[order[router]], best)
        chosen = torch.zeros_like(output[1]).scatter(1, asked, True)
        shares.append((output[1] != chosen).any(-1).float().mean().item())

    order = dict(zip(routers.of_model(model), wanted, strict=True))
    for router in order:
        router.register_forward_hook(compare)
    choices = context.Choices(layers, torch.uint8, backward=True)
    with context.choices.set(choices):
        with choices.of_forward(context.Forced(wanted, given)):
            loss = run(model, rows(bench, groups, torch.stack(texts((16, 16))), torch.ones(2, 16)))
        loss.backward()
    return {"loss": loss.detach(), **gradients(model, groups)}, max(shares)


def native_recompute(bench: Bench) -> float:
    """mcore's own replay with two micro-batches in flight, recomputed against kept."""
    with bench.layout() as groups:
        tokens = torch.stack(texts((16,) * 2 * _MICRO_BATCHES))
        seen: list[Numbers] = []
        for how in (None, _FULL):
            model = chunk(bench, groups, EXPERTS, recompute=how, router_replay=True)
            found = routers.of_model(model)
            losses = []
            for number, part in enumerate(tokens.split(2)):
                for index, router in enumerate(found):
                    routers.give_native_routes(router, _routes(index, number).to(bench.device))
                losses.append(run(model, rows(bench, groups, part, torch.ones(2, 16))))
            for loss in losses:
                loss.backward()
            seen.append({"loss": torch.stack(losses).detach(), **gradients(model, groups)})
        return gap(seen[1], seen[0])


def _routes(router: int, micro_batch: int) -> torch.Tensor:
    """Distinct experts for every token, others for every router and micro-batch; [t, k]."""
    generator = torch.Generator().manual_seed(10 * micro_batch + router)
    return torch.rand(_TOKENS, EXPERTS["num_experts"], generator=generator).topk(_TOPK).indices
