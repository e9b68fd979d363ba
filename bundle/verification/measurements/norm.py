"""The gradient norm over tensor-parallel ranks, against that of one rank."""

from bundle.verification.bench import Bench
from bundle.verification.numbers import gap, gradient_norm
from bundle.verification.tiny import EXPERTS, LATENT


def whole_weights(bench: Bench) -> float:
    """The gradient norm of latent attention, split over two ranks and on one."""
    with bench.layout() as groups:
        reference = gradient_norm(bench, groups, LATENT)
    with bench.layout(tp=2) as groups:
        return gap(gradient_norm(bench, groups, LATENT), reference)


def expert_weights(bench: Bench) -> float:
    """The gradient norm with half of the experts on each of two tensor-parallel ranks, and on one."""
    with bench.layout() as groups:
        reference = gradient_norm(bench, groups, EXPERTS)
    with bench.layout(tp=2, ep=2) as groups:
        return gap(gradient_norm(bench, groups, EXPERTS), reference)
