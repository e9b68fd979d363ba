"""Gradients as the schedule and the data-parallel wrapper leave them."""

from bundle.verification.bench import Bench
from bundle.verification.numbers import gap, gradient_norm
from bundle.verification.tiny import DENSE


def per_token(bench: Bench) -> float:
    """The gradient norm of a loss per token: the same rows shared by two ranks, and on each of them."""
    with bench.layout() as groups:
        reference = gradient_norm(bench, groups, DENSE)
    with bench.layout(cp=2) as groups:
        return gap(gradient_norm(bench, groups, DENSE), reference)
