"""Ids and labels that are no token: nothing where there is no loss, no number where there is one."""

import math
from collections.abc import Callable

import torch

from bundle.engine import Engine
from bundle.engine.microbatch import from_rows
from bundle.verification.numbers import DENSE_HF_CONFIG, Bench
from tests.engine.experiments import engine, recipe

ROWS, LENGTH = 2, 16
UNLEARNED, LEARNED = (0, 3), (1, 9)


def whole(bench: Bench) -> float:
    """One rank has the whole vocabulary: 0, or what is not as it should be."""
    return _surprises(bench, {})


def shared(bench: Bench) -> float:
    """Two ranks share it."""
    return _surprises(bench, {"tp": 2})


def _surprises(bench: Bench, parallel: dict[str, int]) -> float:
    job = recipe(DENSE_HF_CONFIG, parallel, packed=False, layers=1)
    vocabulary = job.architecture.vocab_size
    with engine(bench, job) as of:
        right = _losses(of, lambda ids, labels: None)
        assert all(map(math.isfinite, right))
        for stranger in (-100, vocabulary, 10 * vocabulary):

            def unlearned(_: torch.Tensor, labels: torch.Tensor, put: int = stranger) -> None:
                labels[UNLEARNED] = put

            def learned(_: torch.Tensor, labels: torch.Tensor, put: int = stranger) -> None:
                labels[LEARNED] = put

            assert _losses(of, unlearned) == right
            assert all(map(math.isnan, _losses(of, learned)))
            assert _nothing(of, learned) == {LEARNED} and _nothing(of, unlearned) == set()

        def given(ids: torch.Tensor, _: torch.Tensor) -> None:
            ids[UNLEARNED] = vocabulary  # a padding row of the embedding, so that one rank finds it too

        assert all(map(math.isnan, _losses(of, given))) and len(_nothing(of, given)) == ROWS * LENGTH
    return 0.0


Change = Callable[[torch.Tensor, torch.Tensor], None]


def _losses(of: Engine, change: Change) -> list[float]:
    """Main and MTP loss, and those under an objective that is the main loss."""
    seen = []
    for objective in (None, lambda _, scores: -scores.log_probs):
        of.forward_backward([_micro_batch(of, change)], objective)
        losses = of.take_losses()
        seen += [losses.main, *losses.mtp]
    return seen


def _nothing(of: Engine, change: Change) -> set[tuple[int, ...]]:
    """Where `log_probs` gives no number."""
    (scores,) = of.compute_log_probs([_micro_batch(of, change)])
    return {tuple(place) for place in scores.log_probs.isnan().nonzero().tolist()}


def _micro_batch(of: Engine, change: Change):  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(3)
    shape, vocabulary = (ROWS, LENGTH), of.recipe.architecture.vocab_size
    ids, labels = (torch.randint(0, vocabulary, shape, generator=generator) for _ in range(2))
    mask = torch.ones(shape)
    mask[UNLEARNED] = 0
    change(ids, labels)
    return from_rows(ids, labels, mask, cp=1, rank=0, mtp_layers=1)
