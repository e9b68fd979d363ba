"""Experts over ranks and their routers: balancing losses, counts, padding and replayed routes."""

import inspect
import sys
import weakref
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch

from bundle.mcore import context, optimization, routers
from bundle.verification.numbers import (
    EXPERTS_CONFIG,
    MLA_CONFIG,
    Bench,
    BenchLayout,
    Numbers,
    draw_sequences_with_next_token,
    find_worst,
    measure_gap,
    sum_token_losses,
)

_BALANCING = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 2.0,
    "moe_z_loss_coeff": 0.5,
}
_MLA_MOE_CONFIG = MLA_CONFIG | {"first_k_dense_replace": 1}


def measure_ep_expert_gradients(bench: Bench) -> float:
    """Measure experts on two ranks, each with all the tokens, against all experts on one rank."""
    with bench.open_layout() as layout:
        reference = layout.run_backward(layout.build_chunk(EXPERTS_CONFIG), [layout.build_two_rows()])
    with bench.open_layout(ep=2) as layout:
        seen = layout.run_backward(layout.build_chunk(EXPERTS_CONFIG), [layout.build_two_rows()])
    # A rank has half of the experts, and they see the same tokens twice: its own and the other's.
    local_numbers = {name: x / 2 if ".experts." in name else x for name, x in seen.items()}
    return measure_gap(local_numbers, {name: reference[name] for name in local_numbers})


def measure_fp32_router(bench: Bench) -> float:
    """Measure a router set to compute in fp32 in a model of fp32, against one without that setting."""
    seen: list[Numbers] = []
    with bench.open_layout() as layout:
        for dtype in (None, "fp32"):
            model = layout.build_chunk(EXPERTS_CONFIG, {"moe_router_dtype": dtype})
            seen.append(layout.run_backward(model, [layout.build_two_rows()]))
    return measure_gap(seen[1], seen[0])


def measure_per_token_balancing_gradient(bench: Bench) -> float:
    """Measure the gradient norm of per-token losses: two context- or tensor-parallel ranks against one."""
    return find_worst(
        bench.measure_norm_gap(EXPERTS_CONFIG, _BALANCING, **sizes)
        for sizes in ({"cp": 2}, {"tp": 2, "ep": 2})
    )


def measure_cp_mean_balancing_gradient(bench: Bench) -> float:
    """Measure the gradient norm of mean losses over two context-parallel ranks, against that of one."""
    return bench.measure_norm_gap(EXPERTS_CONFIG, _BALANCING | {"calculate_per_token_loss": False}, cp=2)


def measure_sequence_aux_loss_gradient(bench: Bench) -> float:
    """Measure the gradient norm of a per-sequence loss: one micro-batch of two rows, against two of one."""
    options = _BALANCING | {"moe_router_load_balancing_type": "seq_aux_loss"}
    with bench.open_layout() as layout:
        apart = layout.measure_gradient_norm(EXPERTS_CONFIG, options, rows_at_once=1)
        return measure_gap(layout.measure_gradient_norm(EXPERTS_CONFIG, options), apart)


def measure_expert_counts(bench: Bench) -> float:
    """Measure a bf16 model's counts of tokens per expert, against the tokens that its router sent there."""
    with bench.open_layout() as layout:
        model = layout.build_chunk(_MLA_MOE_CONFIG, dtype="bf16")
        (wrapped,) = optimization.wrap_data_parallel(
            layout.build_recipe(_MLA_MOE_CONFIG, dtype="bf16"), model.config, [model]
        )
        (router,) = routers.find_routers(model)
        sent = torch.zeros(_MLA_MOE_CONFIG["n_routed_experts"], device=bench.device)

        def count(_module: torch.nn.Module, _args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            sent.add_(output[1].sum(0))

        router.register_forward_hook(count)
        for part in torch.stack(draw_sequences_with_next_token((128,) * 24)).split(
            8
        ):  # 768 for each expert, on average
            sum_token_losses(wrapped, layout.build_batch(part, torch.ones(8, 128)))
        return measure_gap({"counts": router.local_tokens_per_expert.float()}, {"counts": sent})


_EXPERTS, _TOPK, _HIDDEN = 8, 2, 64  # of EXPERTS_CONFIG
_AUX_LOSS_OPTIONS = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}
_GLOBAL_LOSS_CONFIG = _AUX_LOSS_OPTIONS | {"moe_router_load_balancing_type": "global_aux_loss"}
_BIASED_ROUTER = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}


def measure_masked_expert_counts(bench: Bench) -> float:
    """Measure the reported tokens of each expert under a mask: with more tokens than experts, and as many."""
    gaps = []
    with bench.open_layout() as layout:
        for tokens in (3 * _EXPERTS, _EXPERTS):
            rows = _draw_rows(bench, tokens)
            padded = torch.arange(tokens, device=bench.device) % 4 == 1
            masked_router, unpadded_router = (_build_router(layout, _BIASED_ROUTER) for _ in range(2))
            masked_router(rows[:, None], padding_mask=padded[:, None])
            unpadded_router(rows[~padded][:, None])
            counts = (router.local_tokens_per_expert.clone() for router in (masked_router, unpadded_router))
            gaps.append(measure_gap(*({"counts": count} for count in counts)))
    return find_worst(gaps)


def measure_unpadded_mask_balancing_gradient(bench: Bench) -> float:
    """Measure a rank's balancing gradient under a mask without any padding, against that without a mask."""
    with bench.open_layout(tp=2, ep=2) as layout:
        rows = _draw_rows(bench, 24)[:, None]
        seen = []
        for mask in (torch.zeros(24, 1, dtype=torch.bool, device=bench.device), None):
            router = _build_router(layout, _AUX_LOSS_OPTIONS)
            router(rows, padding_mask=mask)[0].sum().mul(0.0).backward()
            seen.append({"gradient": router.weight.grad})
        return measure_gap(*seen)


def measure_aux_gradient_against_formula(bench: Bench) -> float:
    """Measure the global loss's gradient in micro-batches of 12, 20 and 5 tokens, against its formula."""
    parts = _draw_rows(bench, 37).split((12, 20, 5))
    with bench.open_layout() as layout:
        router = _build_router(layout, _GLOBAL_LOSS_CONFIG | {"calculate_per_token_loss": False})
        for part in parts:
            router(part[:, None])[0].sum().mul(0.0).backward()
        weight = router.weight.detach().clone().requires_grad_()
        counts = torch.zeros(_EXPERTS, device=bench.device)
        for part in parts:
            scores = (part @ weight.t()).softmax(-1)
            counts += torch.zeros_like(scores).scatter(1, scores.topk(_TOPK).indices, 1.0).sum(0)
            (_EXPERTS * (counts / counts.sum() * scores.mean(0)).sum()).backward()
        return measure_gap({"gradient": router.weight.grad}, {"gradient": weight.grad})


def _build_router(layout: BenchLayout, options: Mapping[str, Any]) -> torch.nn.Module:
    """Return the first router of a tiny model, with the same weights every time."""
    return routers.find_routers(layout.build_chunk(EXPERTS_CONFIG, options))[0]


def _draw_rows(bench: Bench, tokens: int) -> torch.Tensor:
    """Return hidden states [tokens, h], the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(tokens, _HIDDEN, generator=generator).to(bench.device)


_FULL_RECOMPUTE = {"granularity": "full"}
_SORTING_STEPS = ("dispatch_postprocess", "combine_preprocess")
_TOKENS, _TOPK, _MICRO_BATCHES = 32, 2, 2


def count_unfreed_recompute_inputs(bench: Bench) -> float:
    """Return how many layers' recomputed inputs are still in memory after the backward pass."""
    inputs: list[weakref.ref[torch.Tensor]] = []

    def remember(_module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if context.is_in_backward():
            inputs.extend(weakref.ref(x) for x in (*args, kwargs.get("hidden_states")) if torch.is_tensor(x))

    with bench.open_layout() as layout:
        model = layout.build_chunk(EXPERTS_CONFIG, recompute=_FULL_RECOMPUTE)
        for layer in model.decoder.layers:
            layer.register_forward_pre_hook(remember, with_kwargs=True)
        sum_token_losses(model, layout.build_two_rows()).backward()
        if not inputs:
            return float("inf")
        return float(sum(reference() is not None for reference in inputs))


def count_sorts_on_one_rank(bench: Bench) -> float:
    """Return how often one rank with all experts sorts their tokens again, plus the gap to megatron's own.

    The gap is that of loss and gradients to the same model with the functions that are not patched.
    """
    with bench.open_layout() as layout:
        model, same = (layout.build_chunk(EXPERTS_CONFIG) for _ in range(2))
        dispatcher = type(model.decoder.layers[-1].mlp.token_dispatcher)
        originals = {name: inspect.unwrap(getattr(dispatcher, name)) for name in _SORTING_STEPS}
        with mock.patch.multiple(dispatcher, **originals):
            expected = layout.run_backward(model, [layout.build_two_rows()])
        module = sys.modules[dispatcher.__module__]
        sort = mock.Mock(side_effect=vars(module)["sort_chunks_by_idxs"])
        with mock.patch.object(module, "sort_chunks_by_idxs", sort):
            seen = layout.run_backward(same, [layout.build_two_rows()])
    return sort.call_count + measure_gap(seen, expected)


def measure_router_replay_mismatch(bench: Bench) -> float:
    """Measure the share of tokens with other experts than requested; then full recomputation against none."""
    with bench.open_layout() as layout:
        (plain, missed), (recomputed, missed_too) = (
            _run_backward_with_forced_routes(layout, recompute) for recompute in (None, _FULL_RECOMPUTE)
        )
        return find_worst([missed, missed_too, measure_gap(recomputed, plain)])


def _run_backward_with_forced_routes(
    layout: BenchLayout, recompute: dict[str, str] | None
) -> tuple[Numbers, float]:
    """Return loss and gradients under fixed routes, and the largest share of tokens a router sent elsewhere.

    Every fourth token is left to the router, which must choose the k best of its scores.
    """
    model = layout.build_chunk(EXPERTS_CONFIG, recompute=recompute, router_replay=True)
    layers = routers.map_decoder_routers_to_layers(model)
    forced_routes = {layer: _draw_expert_indices(layer, 0).to(layout.device) for layer in layers.values()}
    forced_mask = torch.arange(_TOKENS, device=layout.device) % 4 > 0
    shares: list[float] = []

    def compare(router: torch.nn.Module, args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        best = router.gating(args[0]).view(_TOKENS, -1).topk(_TOPK).indices
        expected = torch.where(forced_mask[:, None], forced_routes[order[router]], best)
        chosen = torch.zeros_like(output[1]).scatter(1, expected, True)
        shares.append((output[1] != chosen).any(-1).float().mean().item())

    order = dict(zip(routers.find_routers(model), forced_routes, strict=True))
    for router in order:
        router.register_forward_hook(compare)
    choices = context.RouterChoices(layers, torch.uint8, has_backward=True)
    with context.router_choices.set(choices):
        with choices.record_forward(context.ForcedRoutes(forced_routes, forced_mask)):
            loss = sum_token_losses(model, layout.build_two_rows())
        loss.backward()
    return {"loss": loss.detach(), **layout.collect_cp_summed_gradients(model)}, max(shares)


def measure_megatron_replay_recompute(bench: Bench) -> float:
    """Measure megatron-core's own replay with two micro-batches in flight, recomputed against kept."""
    with bench.open_layout() as layout:
        tokens = torch.stack(draw_sequences_with_next_token((16,) * 2 * _MICRO_BATCHES))
        seen: list[Numbers] = []
        for recompute in (None, _FULL_RECOMPUTE):
            model = layout.build_chunk(EXPERTS_CONFIG, recompute=recompute, router_replay=True)
            layer_routers = routers.find_routers(model)
            losses = []
            for number, part in enumerate(tokens.split(2)):
                for index, router in enumerate(layer_routers):
                    routers.set_megatron_replay(router, _draw_expert_indices(index, number).to(bench.device))
                losses.append(sum_token_losses(model, layout.build_batch(part, torch.ones(2, 16))))
            for loss in losses:
                loss.backward()
            seen.append({"loss": torch.stack(losses).detach(), **layout.collect_cp_summed_gradients(model)})
        return measure_gap(seen[1], seen[0])


def _draw_expert_indices(router: int, micro_batch: int) -> torch.Tensor:
    """Return distinct experts for every token, others for every router and micro-batch; [t, k]."""
    generator = torch.Generator().manual_seed(10 * micro_batch + router)
    return torch.rand(_TOKENS, EXPERTS_CONFIG["num_experts"], generator=generator).topk(_TOPK).indices
