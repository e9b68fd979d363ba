"""Losses of whole sequences from the logits of every head: main, multi-token prediction, an objective."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.reference.texts import Text

ENTROPY = 0.1  # its weight in the objective

# The logits [n, v] of a text: of the main head, then of each depth of multi-token prediction.
Heads = Callable[[Text], Sequence[Tensor]]


def scores(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies) [n] of logits [n, v], in float64."""
    log_p = (logits.double() / temperature).log_softmax(-1)
    return log_p.gather(-1, labels[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def computed(
    heads: Heads,
    sequences: Sequence[Text],
    *,
    depths: int,
    scale: float,
    mean: str = "token",
    objective: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(what is differentiated, every loss and the scores of each sequence by name).

    All losses are divided by the learned tokens (or sequences) of the main loss; those reported are means
    over their own. `scale` is shared by the `depths`.
    """
    sums = torch.zeros(1 + depths, dtype=torch.float64)
    weights = torch.zeros(1 + depths, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    found: dict[str, Tensor] = {}
    learned = sum(float(text.mask.sum()) for text in sequences)
    divisor = learned if mean == "token" else sum(float(text.mask.any()) for text in sequences)
    for place, text in enumerate(sequences):
        n = len(text.mask)
        share = text.mask.double() / (1 if mean == "token" else text.mask.sum().clamp(min=1))
        main, *later = heads(text)
        log_probs, entropy = scores(main, text.tokens[1:], text.temperature if objective else 1.0)
        with torch.no_grad():
            tempered = scores(main, text.tokens[1:], text.temperature)
        found |= {f"log-probs {place}": tempered[0], f"entropy {place}": tempered[1]}
        loss = -log_probs
        if objective:
            loss = -text.advantages * log_probs - ENTROPY * entropy
        terms = [(loss * share).sum()]
        weights[0] += share.sum()
        for depth, logits in enumerate(later, start=1):
            ahead = scores(logits[: n - depth], text.tokens[1 + depth :], 1.0)[0]
            terms.append(-(ahead * share[depth:]).sum())
            weights[depth] += share[depth:].sum()
        sums += torch.stack(terms).detach()
        total = total + terms[0] + scale / max(1, depths) * sum(terms[1:])
    found |= {f"loss {k}": value for k, value in enumerate(sums / weights)}
    return total / divisor, found
