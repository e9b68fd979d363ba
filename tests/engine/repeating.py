"""Deterministic mode: gradients of the reference, the same bits in a second run, and settings that are on."""

from typing import Any

import torch

from bundle.verification.numbers import DENSE_HF_CONFIG, MLA_CONFIG, Bench, find_worst, measure_gap
from tests.engine.experiments import EVEN, engine, gradients, micro_batches, recipe
from tests.engine.reference import computed, texts

DEPTHS = 1


def repeated(bench: Bench, config: dict[str, Any], parallel: dict[str, int]) -> float:
    """The largest distance of any gradient; infinite if a second run differs or a setting is off."""
    whole = computed(bench, config, texts(EVEN), depths=DEPTHS, scale=0.1)
    job = recipe(config, parallel, packed=False, layers=DEPTHS)
    job = job.model_copy(update={"train": job.train.model_copy(update={"deterministic": True})})
    runs = []
    for _ in range(2):
        with engine(bench, job) as made:
            if not (torch.are_deterministic_algorithms_enabled() and made.config.deterministic_mode):
                return float("inf")
            made.forward_backward(micro_batches(made, texts(EVEN), "rows", "token"))
            runs.append(gradients(made))
    first, second = runs
    if not all(torch.equal(value, second[name][0]) for name, (value, _) in first.items()):
        return float("inf")
    return measure_gap(
        {name: value for name, (value, _) in first.items()},
        {name: part(whole[name]) for name, (_, part) in first.items()},
    )


def everywhere(bench: Bench) -> float:
    """Grouped and latent attention, with a prediction layer; alone, over tensor ranks and stages."""
    layouts: tuple[dict[str, int], ...] = ({}, {"tp": 2}, {"pp": 2})
    return find_worst(
        [repeated(bench, config, layout) for config in (DENSE_HF_CONFIG, MLA_CONFIG) for layout in layouts]
    )
