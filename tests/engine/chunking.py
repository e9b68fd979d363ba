"""How far losses in chunks are from plain ones in float64, over the ranks that share a vocabulary."""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from bundle.engine.scores import Head, score_labels
from bundle.mcore import groups
from bundle.mcore.gpt import bypass_head_and_report_weight
from bundle.recipe import Parallel, loss_chunks
from bundle.verification.numbers import Bench, Numbers, measure_gap
from tests.engine import detaching, experiments, oracle
from tests.engine.cells import GROUPS

TOKENS, ROWS, HIDDEN, VOCABULARY = 24, 2, 12, 77  # with four ranks the last has padding alone
WIDTH, CHUNK, KEPT = 128, 7, 11


def share(bench: Bench, tp: int, *, sequence_parallel: bool) -> float:
    """The distance of scores and gradients of a head whose rows are shared by `tp` ranks."""
    generator = torch.Generator().manual_seed(3)
    states, weight, factors = (
        torch.randn(*shape, generator=generator)
        for shape in ((TOKENS, ROWS, HIDDEN), (WIDTH, HIDDEN), (2, ROWS, TOKENS))
    )
    labels = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)
    wanted = [tensor.double().requires_grad_() for tensor in (states, weight * 4)]
    log_p = (wanted[0] @ wanted[1].t())[..., :VOCABULARY].transpose(0, 1).log_softmax(-1)
    expected = [log_p.gather(-1, labels[..., None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)]
    sum((x * y).sum() for x, y in zip(expected, factors.double(), strict=True)).backward()

    layout = Parallel(tp=tp, sequence_parallel=sequence_parallel)
    rank = groups.create_model_parallel_groups(layout, seed=1, timeout_seconds=bench.timeout_seconds).tp
    try:
        part = (weight * 4).chunk(tp)[rank.rank].clone().requires_grad_()
        mine = states.chunk(tp)[rank.rank] if sequence_parallel else states
        mine = mine.clone().requires_grad_()
        layer: Any = SimpleNamespace(weight=None, sequence_parallel=sequence_parallel)
        weights: list[torch.Tensor] = []
        bypass_head_and_report_weight(SimpleNamespace(output_layer=layer), weights.append)
        whole, _ = layer.forward(mine, weight=part, runtime_gather_output=None)
        limit = max(0, VOCABULARY - rank.rank * len(part))
        seen = score_labels(whole, labels, rank.group, None, Head(weights[0], CHUNK, limit, kept_tokens=KEPT))
        both = (seen.log_probs, seen.entropy)
        sum((x * y).sum() for x, y in zip(both, factors, strict=True)).backward()
    finally:
        groups.destroy_model_parallel_groups()
    states_gradient = wanted[0].grad.chunk(tp)[rank.rank] if sequence_parallel else wanted[0].grad
    numbers = (*both, mine.grad, part.grad)
    truth = (*expected, states_gradient, wanted[1].grad.chunk(tp)[rank.rank])
    return measure_gap(_name(numbers), _name(truth))


def _name(tensors: Sequence[Any]) -> Numbers:
    names = ("log-probs", "entropy", "states", "weight")
    return {name: tensor.detach().double() for name, tensor in zip(names, tensors, strict=True)}


one = functools.partial(share, tp=1, sequence_parallel=False)
two = functools.partial(share, tp=2, sequence_parallel=True)
two_without_sequence_parallel = functools.partial(share, tp=2, sequence_parallel=False)
four = functools.partial(share, tp=4, sequence_parallel=True)


def _in_chunks(function: Callable[[Bench], float]) -> Callable[[Bench], float]:
    """The same with eleven tokens kept, and seven in a chunk, of models that have about a hundred words."""

    @functools.wraps(function)
    def run(bench: Bench) -> float:
        with mock.patch.multiple(
            loss_chunks, _CHUNK_LOGITS=CHUNK * WIDTH, _KEPT_LOGITS=KEPT * WIDTH, _LEAST_LOGITS=0
        ):
            return function(bench)

    return run


@_in_chunks
def trained(bench: Bench) -> float:
    """A model with two depths of prediction and a tied head, over tensor-parallel ranks and two stages."""
    return oracle.worst(bench, "mimo", ("tp", "pp"))


@_in_chunks
def detached(bench: Bench) -> float:
    """Heads of prediction whose weight is a constant."""
    return detaching.tied(bench)


@_in_chunks
def scored(bench: Bench) -> float:
    """An objective in the place of the main loss, and an untied head."""
    return experiments.worst(bench, GROUPS["scores"][:1])
