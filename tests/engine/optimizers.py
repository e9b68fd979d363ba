"""How far steps of an optimizer are from the same steps in plain PyTorch and float64, of the plain model."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bundle.recipe import Recipe, from_mapping
from bundle.verification.numbers import Bench, Numbers, measure_gap
from tests.engine.experiments import engine, micro_batches
from tests.engine.oracle import SCALE, SEED, fill, parameters, part, recipe, sequences_of
from tests.reference import model
from tests.reference.configs import CONFIGS
from tests.reference.weights import drawn, megatron_layout

STEPS, LR, DECAY, CLIP = 4, 0.2, 0.3, 1.0
AGREES = 3e-4  # what float32 makes of the change in so many steps: up to 1.3e-4
MOMENTUM, BETAS, EPS = 0.8, (0.7, 0.9), 0.05
CASES: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "sgd_momentum": MOMENTUM},
    "plain sgd": {"name": "sgd", "sgd_momentum": 0.0},
    "adam": {"use_distributed_optimizer": False, "betas": BETAS, "eps": EPS},
}
LAYOUTS: dict[str, dict[str, int]] = {"data": {}, "tensors": {"tp": 2}, "stages": {"pp": 2}}
# Between them: a tied head and experts.
MODELS = ("llama3", "qwen3_moe")


def sgd(weight: Tensor, gradient: Tensor, kept: dict[str, Tensor], _: int, momentum: float) -> Tensor:
    """Weight decay is a part of the gradient, and of the momentum."""
    gradient = gradient + (DECAY * weight if weight.dim() > 1 else 0)
    kept["m"] = gradient if "m" not in kept else momentum * kept["m"] + gradient
    return weight - LR * kept["m"]


def adam(weight: Tensor, gradient: Tensor, kept: dict[str, Tensor], step: int) -> Tensor:
    """Loshchilov and Hutter, "Decoupled weight decay regularization", algorithm 2."""
    zero = torch.zeros_like(weight)
    first, second = BETAS
    kept["m"] = first * kept.get("m", zero) + (1 - first) * gradient
    kept["v"] = second * kept.get("v", zero) + (1 - second) * gradient**2
    m, v = kept["m"] / (1 - first**step), kept["v"] / (1 - second**step)
    decay = DECAY if weight.dim() > 1 else 0
    return weight - LR * (m / (v.sqrt() + EPS) + decay * weight)


RULES: dict[str, Callable[[Tensor, Tensor, dict[str, Tensor], int], Tensor]] = {
    "sgd": functools.partial(sgd, momentum=MOMENTUM),
    "plain sgd": functools.partial(sgd, momentum=0.0),
    "adam": adam,
}


@functools.cache
def _wanted(name: str, case: str) -> tuple[list[Numbers], Numbers]:
    """The losses and the gradient norm of each step; what all of them change in each weight."""
    config, rule = CONFIGS[name], RULES[case]
    weights = start = drawn(config, SEED)
    kept: dict[str, dict[str, Tensor]] = {key: {} for key in weights}
    seen = []
    for step in range(1, STEPS + 1):
        found = model.trained(config, weights, sequences_of(name), scale=SCALE)
        of = {key: found[f"gradient {key}"] for key in weights if f"gradient {key}" in found}
        norm = torch.stack([gradient.square().sum() for gradient in of.values()]).sum().sqrt()
        seen.append({"loss": found["loss 0"], "norm": norm})
        share = min(1.0, CLIP / (float(norm) + 1e-6))
        stepped = {k: rule(weights[k].detach(), share * g, kept[k], step) for k, g in of.items()}
        weights = weights | {key: new.requires_grad_() for key, new in stepped.items()}
    return seen, megatron_layout(config, {k: (weights[k] - start[k]).detach() for k in weights})


def _job(name: str, case: str, layout: str) -> Recipe:
    values = recipe(CONFIGS[name], LAYOUTS[layout], packed=False).dump()
    values["train"]["steps"] = STEPS
    values["optimizer"] = {
        "lr": LR, "weight_decay": DECAY, "clip_grad": CLIP, "schedule": "constant", **CASES[case]
    }  # fmt: skip
    return from_mapping(values)


def compare(bench: Bench, name: str, case: str, layout: str) -> float:
    """The largest relative distance of losses, gradient norms, and of what became of every weight."""
    wanted, changes = _wanted(name, case)
    begun = megatron_layout(CONFIGS[name], drawn(CONFIGS[name], SEED))
    with engine(bench, _job(name, case, layout)) as made:
        fill(made, begun)
        batches, gaps = micro_batches(made, sequences_of(name), "bshd", "token"), []
        for expected in wanted:
            made.forward_backward(batches)
            losses, result = made.take_losses(), made.step_optimizer()
            seen = {"loss": torch.tensor(losses.main), "norm": torch.tensor(result.grad_norm)}
            gaps.append(measure_gap({key: value.double() for key, value in seen.items()}, expected))
        own = parameters(made)
        moved = {p.name: p.parameter.detach().double() - part(p, begun[p.name]) for p in own}
        gaps.append(measure_gap(moved, {p.name: part(p, changes[p.name]) for p in own}))
    return max(gaps)


def __getattr__(name: str) -> Any:
    """The measurement `CASE in LAYOUT`, of every model; on one rank or two."""
    case, found, layout = name.partition(" in ")
    if not found:
        raise AttributeError(name)
    return lambda bench: max(compare(bench, of, case, layout) for of in MODELS)
