"""Experts over ranks and their routers: losses that balance, what is counted, padding, replayed choices."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from bundle.mcore import context, optimization, routers
from bundle.verification.numbers import EXPERTS, LATENT, Bench, Layout, Numbers, gap, run, texts, worst

_BALANCED = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 2.0,
    "moe_z_loss_coeff": 0.5,
}
_STEERED = LATENT | {"first_k_dense_replace": 1}


def over_ranks(bench: Bench) -> float:
    """Experts on two ranks, each with all the tokens, against all experts on one."""
    with bench.layout() as layout:
        reference = layout.trained(layout.chunk(EXPERTS), [layout.two_rows()])
    with bench.layout(ep=2) as layout:
        seen = layout.trained(layout.chunk(EXPERTS), [layout.two_rows()])
    # A rank has half of the experts, and they see the same tokens twice: its own and the other's.
    mine = {name: x / 2 if ".experts." in name else x for name, x in seen.items()}
    return gap(mine, {name: reference[name] for name in mine})


def router_in_fp32(bench: Bench) -> float:
    """A router that is told to compute in fp32 in a model of fp32, against one that is not told."""
    seen: list[Numbers] = []
    with bench.layout() as layout:
        for dtype in (None, "fp32"):
            model = layout.chunk(EXPERTS, {"moe_router_dtype": dtype})
            seen.append(layout.trained(model, [layout.two_rows()]))
    return gap(seen[1], seen[0])


def per_token(bench: Bench) -> float:
    """The gradient norm of losses per token over two context-parallel and two tensor-parallel ranks."""
    return worst(bench.norm_gap(EXPERTS, _BALANCED, **sizes) for sizes in ({"cp": 2}, {"tp": 2, "ep": 2}))


def mean(bench: Bench) -> float:
    """The gradient norm of mean losses over two context-parallel ranks, against that of one."""
    return bench.norm_gap(EXPERTS, _BALANCED | {"calculate_per_token_loss": False}, cp=2)


def sequences(bench: Bench) -> float:
    """The gradient norm of a loss over each sequence: two rows in one micro-batch, against two of one."""
    options = _BALANCED | {"moe_router_load_balancing_type": "seq_aux_loss"}
    with bench.layout() as layout:
        apart = layout.gradient_norm(EXPERTS, options, rows_at_once=1)
        return gap(layout.gradient_norm(EXPERTS, options), apart)


def counts(bench: Bench) -> float:
    """Tokens of each expert that a bf16 model has counted, against those that its router has sent there."""
    with bench.layout() as layout:
        model = layout.chunk(_STEERED, dtype="bf16")
        (wrapped,) = optimization.data_parallel(layout.recipe(_STEERED, dtype="bf16"), model.config, [model])
        (router,) = routers.of_model(model)
        sent = torch.zeros(_STEERED["n_routed_experts"], device=bench.device)

        def count(_module: torch.nn.Module, _args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            sent.add_(output[1].sum(0))

        router.register_forward_hook(count)
        for part in torch.stack(texts((128,) * 24)).split(8):  # 768 for each expert, on average
            run(wrapped, layout.rows(part, torch.ones(8, 128)))
        return gap({"counts": router.local_tokens_per_expert.float()}, {"counts": sent})


_EXPERTS, _TOPK, _HIDDEN = 8, 2, 64  # of EXPERTS
_AUX_LOSS = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}
_GLOBAL_LOSS = _AUX_LOSS | {"moe_router_load_balancing_type": "global_aux_loss"}
_BIASED = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}


def expert_bias(bench: Bench) -> float:
    """How many tokens each expert is said to have: more tokens than experts, and just as many."""
    gaps = []
    with bench.layout() as layout:
        for tokens in (3 * _EXPERTS, _EXPERTS):
            rows = _rows(bench, tokens)
            padded = torch.arange(tokens, device=bench.device) % 4 == 1
            told, given = (_router(layout, _BIASED) for _ in range(2))
            told(rows[:, None], padding_mask=padded[:, None])
            given(rows[~padded][:, None])
            counts = (router.local_tokens_per_expert.clone() for router in (told, given))
            gaps.append(gap(*({"counts": count} for count in counts)))
    return worst(gaps)


def own_count(bench: Bench) -> float:
    """The balancing gradient of a rank under a mask without any padding, against that without a mask."""
    with bench.layout(tp=2, ep=2) as layout:
        rows = _rows(bench, 24)[:, None]
        seen = []
        for mask in (torch.zeros(24, 1, dtype=torch.bool, device=bench.device), None):
            router = _router(layout, _AUX_LOSS)
            router(rows, padding_mask=mask)[0].sum().mul(0.0).backward()
            seen.append({"gradient": router.weight.grad})
        return gap(*seen)


def global_loss(bench: Bench) -> float:
    """The gradient of the global loss of micro-batches of 12, 20 and 5 tokens, against its formula."""
    parts = _rows(bench, 37).split((12, 20, 5))
    with bench.layout() as layout:
        router = _router(layout, _GLOBAL_LOSS | {"calculate_per_token_loss": False})
        for part in parts:
            router(part[:, None])[0].sum().mul(0.0).backward()
        weight = router.weight.detach().clone().requires_grad_()
        counts = torch.zeros(_EXPERTS, device=bench.device)
        for part in parts:
            scores = (part @ weight.t()).softmax(-1)
            counts += torch.zeros_like(scores).scatter(1, scores.topk(_TOPK).indices, 1.0).sum(0)
            (_EXPERTS * (counts / counts.sum() * scores.mean(0)).sum()).backward()
        return gap({"gradient": router.weight.grad}, {"gradient": weight.grad})


def _router(layout: Layout, options: Mapping[str, Any]) -> torch.nn.Module:
    """The first router of a tiny model, the same weights every time."""
    return routers.of_model(layout.chunk(EXPERTS, options))[0]


def _rows(bench: Bench, tokens: int) -> torch.Tensor:
    """Hidden states [tokens, h], the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(tokens, _HIDDEN, generator=generator).to(bench.device)


_FULL = {"granularity": "full"}
_TOKENS, _TOPK, _MICRO_BATCHES = 32, 2, 2


def inputs_alive(bench: Bench) -> float:
    """How many layers' recomputed inputs are still in memory after the backward pass."""
    inputs: list[weakref.ref[torch.Tensor]] = []

    def remember(_module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if context.in_backward():
            inputs.extend(weakref.ref(x) for x in (*args, kwargs.get("hidden_states")) if torch.is_tensor(x))

    with bench.layout() as layout:
        model = layout.chunk(EXPERTS, recompute=_FULL)
        for layer in model.decoder.layers:
            layer.register_forward_pre_hook(remember, with_kwargs=True)
        run(model, layout.two_rows()).backward()
        if not inputs:
            return float("inf")
        return float(sum(reference() is not None for reference in inputs))


def replay(bench: Bench) -> float:
    """The share of tokens whose experts are not those asked for; then full recomputation against none."""
    with bench.layout() as layout:
        (kept, missed), (recomputed, missed_too) = (_replayed(layout, how) for how in (None, _FULL))
        return worst([missed, missed_too, gap(recomputed, kept)])


def _replayed(layout: Layout, how: dict[str, str] | None) -> tuple[Numbers, float]:
    """Loss and gradients under given routes, and the largest share of tokens that a router sent elsewhere.

    Every fourth token is left to the router, which must keep the k best of its scores.
    """
    model = layout.chunk(EXPERTS, recompute=how, router_replay=True)
    layers = routers.of_layers(model)
    wanted = {layer: _routes(layer, 0).to(layout.device) for layer in layers.values()}
    given = torch.arange(_TOKENS, device=layout.device) % 4 > 0
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
            loss = run(model, layout.two_rows())
        loss.backward()
    return {"loss": loss.detach(), **layout.gradients(model)}, max(shares)


def native_recompute(bench: Bench) -> float:
    """mcore's own replay with two micro-batches in flight, recomputed against kept."""
    with bench.layout() as layout:
        tokens = torch.stack(texts((16,) * 2 * _MICRO_BATCHES))
        seen: list[Numbers] = []
        for how in (None, _FULL):
            model = layout.chunk(EXPERTS, recompute=how, router_replay=True)
            found = routers.of_model(model)
            losses = []
            for number, part in enumerate(tokens.split(2)):
                for index, router in enumerate(found):
                    routers.give_native_routes(router, _routes(index, number).to(bench.device))
                losses.append(run(model, layout.rows(part, torch.ones(2, 16))))
            for loss in losses:
                loss.backward()
            seen.append({"loss": torch.stack(losses).detach(), **layout.gradients(model)})
        return gap(seen[1], seen[0])


def _routes(router: int, micro_batch: int) -> torch.Tensor:
    """Distinct experts for every token, others for every router and micro-batch; [t, k]."""
    generator = torch.Generator().manual_seed(10 * micro_batch + router)
    return torch.rand(_TOKENS, EXPERTS["num_experts"], generator=generator).topk(_TOPK).indices
