"""Log-probabilities and entropies of tokens: from logits that tensor ranks share, and to every other rank."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from bundle.engine.microbatch import MicroBatch
from bundle.mcore.groups import Groups

# Rows are taken in portions: beside the logits and their gradient, no tensor is as large as them. This many
# numbers (128 MiB in float32) are enough to keep a device busy.
_PORTION = 1 << 25


@dataclass(frozen=True)
class Scores:
    """What a model says of each label: its log-probability, and the entropy [nats] of the distribution."""

    log_probs: Tensor
    entropy: Tensor


def score(
    logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None, temperature: Tensor | None = None
) -> Scores:
    """The scores [b, s] of `labels` [b, s] under `logits` [s, b, vocabulary / tp], in float32 at least.

    `group` holds the ranks that share the vocabulary; None for one. `temperature` [b, s] divides the logits
    of each token. Both results are differentiable with respect to the logits, exactly. The log-probability
    of a label that has no logit is not a number.
    """
    columns = logits.shape[-1] * (group.size() if group is not None else 1)
    known = (labels >= 0) & (labels < columns)
    rows = labels.shape[::-1]
    log_probs, entropy = _Score.apply(  # type: ignore[no-untyped-call]
        logits.flatten(0, 1),
        labels.t().flatten(),
        None if temperature is None else temperature.t().flatten(),
        group if group is not None and group.size() > 1 else None,
    )
    return Scores(log_probs.view(rows).t() * torch.where(known, 1.0, float("nan")), entropy.view(rows).t())


class _Score(torch.autograd.Function):
    """(log-probabilities, entropies) [n] from logits [n, v]; keeps those as they came, and [n] numbers."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, temperature: Tensor | None, group: Any) -> Any:
        width = logits.shape[1]
        column = labels - (width * group.rank() if group is not None else 0)
        here = (column >= 0) & (column < width)
        column = column.where(here, 0)

        parts = []
        for rows in _portions(logits):
            x = _tempered(logits, temperature, rows)
            peak = x.amax(1)
            x = x - peak[:, None]
            picked = x.gather(1, column[rows, None]).squeeze(1)
            weights = x.exp()
            total = weights.sum(1)
            parts.append((peak, total, weights.mul_(x).sum(1), picked))
        peak, total, weighted, picked = (torch.cat(part) for part in zip(*parts, strict=True))
        if group is not None:
            peak, total, weighted, picked = _over_ranks(
                group, peak, total, weighted, picked.where(here, 0), here
            )

        norm = total.log()
        entropy = norm - weighted / total
        ctx.save_for_backward(logits, column, here, temperature, peak + norm, entropy)
        ctx.set_materialize_grads(False)
        return picked - norm, entropy

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, of_log_probs: Tensor | None, of_entropy: Tensor | None) -> Any:
        logits, column, here, temperature, norm, entropy = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows in _portions(logits):
            log_p = _tempered(logits, temperature, rows) - norm[rows, None]
            p = log_p.exp()
            if of_entropy is None:
                slope = torch.zeros_like(p)
            else:
                slope = log_p.add_(entropy[rows, None]).mul_(of_entropy[rows, None]).mul_(p).neg_()
            if of_log_probs is not None:
                slope -= p.mul_(of_log_probs[rows, None])
                slope.scatter_add_(1, column[rows, None], (of_log_probs * here)[rows, None])
            gradient[rows] = slope if temperature is None else slope.div_(temperature[rows, None])
        return gradient, None, None, None


def _over_ranks(
    group: dist.ProcessGroup, peak: Tensor, total: Tensor, weighted: Tensor, picked: Tensor, here: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same numbers over the vocabulary of all ranks, from those of each."""
    highest = peak.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    below = peak - highest
    share = below.exp()
    sums = torch.stack((total * share, (weighted + below * total) * share, (picked + below) * here))
    dist.all_reduce(sums, group=group)
    return highest, *sums.unbind()


def _portions(logits: Tensor) -> Iterator[slice]:
    rows = max(1, _PORTION // logits.shape[1])
    return (slice(first, first + rows) for first in range(0, logits.shape[0], rows))


def _tempered(logits: Tensor, temperature: Tensor | None, rows: slice) -> Tensor:
    """These rows of the logits in float32 at least, divided by their temperatures; may be the logits."""
    x = logits[rows]
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x if temperature is None else x / temperature[rows, None]


def collect(
    micro_batches: Sequence[MicroBatch], seen: Sequence[Scores], groups: Groups, device: torch.device
) -> list[Scores]:
    """The scores of each micro-batch in the order that it was made from (`MicroBatch.whole`), on every rank.

    `seen` are this rank's, [b, s / cp] each; empty on stages without a head. Two collectives, whatever the
    number of micro-batches: the context-parallel ranks exchange their parts, the last stage tells the others.
    """
    sizes = [micro_batch.ids.numel() for micro_batch in micro_batches]
    both = torch.empty(groups.cp.size * 2, sum(sizes), device=device)
    if seen:
        parts = [torch.stack((one.log_probs, one.entropy)).flatten(1) for one in seen]
        dist.all_gather_into_tensor(both, torch.cat(parts, 1), group=groups.cp.group)
    if groups.pp.size > 1:
        last = dist.get_global_rank(groups.pp.group, groups.pp.size - 1)
        dist.broadcast(both, last, group=groups.pp.group)

    found = []
    for micro_batch, part in zip(micro_batches, both.split(sizes, -1), strict=True):
        rows, columns = micro_batch.ids.shape
        log_probs, entropy = part.unflatten(0, (-1, 2)).unbind(1)
        shape = groups.cp.size * rows, columns
        found.append(
            Scores(micro_batch.whole(log_probs.reshape(shape)), micro_batch.whole(entropy.reshape(shape)))
        )
    return found
