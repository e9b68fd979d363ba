"""The losses that balance experts, written plainly: float64, from the router logits of single sequences."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Balance:
    """Weights of the two terms, and how experts are chosen and scored; `together` tokens share a loss."""

    aux: float
    z: float
    topk: int
    sigmoid: bool
    together: int  # sequences of one balancing loss: 1, or those of a micro-batch


def hear(model: torch.nn.Module) -> list[list[torch.Tensor]]:
    """A list for each router of a model that gets the logits [n, e] of each of its forward passes."""
    heard = []
    for router in model.modules():
        if hasattr(router, "gating"):
            heard.append(_listen(router))
    return heard


def _listen(router: torch.nn.Module) -> list[torch.Tensor]:
    gating, logits = router.gating, []

    def kept(x: torch.Tensor) -> torch.Tensor:
        found = gating(x)
        logits.append(found.flatten(0, -2))
        return found

    router.gating = kept
    return logits


def term(heard: Sequence[Sequence[torch.Tensor]], balance: Balance) -> torch.Tensor:
    """What is added to the mean loss, of every router's logits of each sequence."""
    total = torch.zeros((), dtype=torch.float64)
    for sequences in heard:
        tokens = sum(len(one) for one in sequences)
        for first in range(0, len(sequences), balance.together):
            group = torch.cat(list(sequences[first : first + balance.together])).double()
            total = total + balance.aux * len(group) / tokens * _imbalance(group, balance)
            squares = [torch.log(row.exp().sum()) ** 2 for row in group]
            total = total + balance.z * sum(squares) / tokens
    return total


def _imbalance(logits: torch.Tensor, balance: Balance) -> torch.Tensor:
    """1 where every expert is as often among the best k as any other, and scored alike."""
    raw = 1 / (1 + (-logits).exp()) if balance.sigmoid else logits.exp()
    scores = raw / raw.sum(1, keepdim=True)
    experts = scores.shape[1]
    chosen = scores.argsort(dim=1, descending=True)[:, : balance.topk]
    often = torch.stack([(chosen == i).any(1).double().mean() for i in range(experts)]) / balance.topk
    return experts * (often * scores.mean(0)).sum()
