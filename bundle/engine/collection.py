"""Scores from where they are computed, the last pipeline stage, to every rank of the model replica."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from bundle.engine.microbatch import MicroBatch
from bundle.engine.scores import Scores
from bundle.mcore.groups import Groups


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
