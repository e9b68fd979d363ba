"""Multi-token prediction detached from the rest: whose gradients are those of a model without its losses."""

import torch

from bundle.verification.numbers import DENSE_HF_CONFIG, Bench, Numbers, find_worst, measure_gap
from tests.engine.experiments import EVEN, engine, gradients, micro_batches, recipe
from tests.engine.reference import computed, texts

DEPTHS = 2


def detached(
    bench: Bench,
    parallel: dict[str, int],
    *,
    trunk: bool = True,
    embeddings: bool = True,
    tied: bool = False,
    recompute: dict | None = None,
) -> float:
    """The largest distance of any gradient from what it should be; infinite if nothing was detached.

    Of the parts that are detached: from that of the main loss alone. Of the MTP layers: from that of all
    losses. The other parts are compared where their gradient does not pass through a detached one.
    """
    config = DENSE_HF_CONFIG | {"tie_word_embeddings": tied}
    whole, alone = (computed(bench, config, texts(EVEN), depths=DEPTHS, scale=scale) for scale in (0.1, 0.0))
    job = recipe(
        config,
        parallel,
        packed=False,
        recompute=recompute,
        layers=DEPTHS,
        detach_trunk=trunk,
        detach_embeddings=embeddings,
    )
    expected = {name: value for name, value in whole.items() if name.startswith("mtp.")}
    if trunk:
        expected |= {name: value for name, value in alone.items() if name.startswith("decoder.")}
    if embeddings:
        expected |= {name: value for name, value in alone.items() if name.startswith("output_layer.")}
    if trunk and embeddings:
        expected |= {name: value for name, value in alone.items() if name.startswith("embedding.")}
    with engine(bench, job) as made:
        made.forward_backward(micro_batches(made, texts(EVEN), "rows", "token"))
        here = gradients(made)
    names = [name for name in here if name in expected]
    if not _differs(whole, alone, [name for name in names if not name.startswith("mtp.")]):
        return float("inf")  # the losses would not reach these parts anyway: nothing is shown
    return measure_gap(
        {name: here[name][0] for name in names}, {name: here[name][1](expected[name]) for name in names}
    )


def _differs(whole: Numbers, alone: Numbers, names: list[str]) -> bool:
    return all(not torch.allclose(whole[name], alone[name], rtol=1e-3, atol=0) for name in names)


def everything(bench: Bench) -> float:
    """Each option by itself, both, and both where the last stage holds its own copy of the embedding."""
    layouts: tuple[dict[str, int], ...] = ({"cp": 2}, {"pp": 2})
    single = [detached(bench, {}, trunk=trunk, embeddings=not trunk) for trunk in (True, False)]
    both = [detached(bench, layout) for layout in layouts]
    return find_worst([*single, *both])


def tied(bench: Bench) -> float:
    """Both options where the head's weight is the embedding's, over two stages."""
    return detached(bench, {"pp": 2}, tied=True)


def recomputed(bench: Bench) -> float:
    """Under full recomputation, where a layer without an input that has a gradient gets none itself."""
    return detached(bench, {}, recompute={"granularity": "full"})
