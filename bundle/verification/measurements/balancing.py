"""Megatron's own losses that balance experts over ranks and rows, and what the steering bias counts."""

from typing import Any

import torch

from bundle.mcore import optimization, routers
from bundle.verification.bench import Bench
from bundle.verification.numbers import gap, gradient_norm, norm_gap, run, worst
from bundle.verification.tiny import EXPERTS, LATENT, chunk, recipe, rows, texts

_BALANCED = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 2.0,
    "moe_z_loss_coeff": 0.5,
}
_STEERED = LATENT | {"first_k_dense_replace": 1}


def per_token(bench: Bench) -> float:
    """The gradient norm of losses per token over two context-parallel and two tensor-parallel ranks."""
    return worst(norm_gap(bench, EXPERTS, _BALANCED, **sizes) for sizes in ({"cp": 2}, {"tp": 2, "ep": 2}))


def mean(bench: Bench) -> float:
    """The gradient norm of mean losses over two context-parallel ranks, against that of one."""
    return norm_gap(bench, EXPERTS, _BALANCED | {"calculate_per_token_loss": False}, cp=2)


def sequences(bench: Bench) -> float:
    """The gradient norm of a loss over each sequence: two rows in one micro-batch, against two of one."""
    options = _BALANCED | {"moe_router_load_balancing_type": "seq_aux_loss"}
    with bench.layout() as groups:
        apart = gradient_norm(bench, groups, EXPERTS, options, rows_at_once=1)
        return gap(gradient_norm(bench, groups, EXPERTS, options), apart)


def counts(bench: Bench) -> float:
    """Tokens of each expert that a bf16 model has counted, against those that its router has sent there."""
    with bench.layout() as groups:
        model = chunk(bench, groups, _STEERED, dtype="bf16")
        (wrapped,) = optimization.data_parallel(recipe(_STEERED, groups, dtype="bf16"), model.config, [model])
        (router,) = routers.of_model(model)
        sent = torch.zeros(_STEERED["n_routed_experts"], device=bench.device)

        def count(_module: torch.nn.Module, _args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            sent.add_(output[1].sum(0))

        router.register_forward_hook(count)
        for part in torch.stack(texts((128,) * 24)).split(8):  # 768 for each expert, on average
            run(wrapped, rows(bench, groups, part, torch.ones(8, 128)))
        return gap({"counts": router.local_tokens_per_expert.float()}, {"counts": sent})
