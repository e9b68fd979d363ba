"""The gradient norm over tensor-parallel ranks, against that of one rank."""

from bundle.verification.bench import Bench
from bundle.verification.numbers import norm_gap
from bundle.verification.tiny import EXPERTS, LATENT


def latent_attention(bench: Bench) -> float:
    """Latent attention, whose down projections every rank holds whole, split over two ranks."""
    return norm_gap(bench, LATENT, tp=2)


def experts(bench: Bench) -> float:
    """Half of the experts on each of two tensor-parallel ranks."""
    return norm_gap(bench, EXPERTS, tp=2, ep=2)
