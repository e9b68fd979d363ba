"""One micro-batch as a model chunk reads it: cut for this context-parallel rank, with its MTP masks."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from bundle.engine.replay.routes import Routes
from bundle.mcore.packed import packed_seq_params
from bundle.sequences.packing import Packing, shard


@dataclass(frozen=True)
class MicroBatch:
    """Tensors on the rank's device, [b, s / cp] (packed: [1, t / cp]).

    `mtp_masks[k]` is the loss mask of MTP depth k. `sequence_length` [tokens] and `rows` are those of the
    whole micro-batch before it was cut. `packed` is megatron's PackedSeqParams, or None in bshd; `packing`
    is None for rows of equal length. `routes` are what the routers choose, None: as they like.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    mtp_masks: tuple[torch.Tensor, ...]
    rows: int
    sequence_length: int
    packed: Any | None = None
    packing: Packing | None = None
    routes: Routes | None = None


def from_rows(
    ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, *, cp: int, rank: int, mtp_layers: int
) -> MicroBatch:
    """A micro-batch of rows of equal length: `ids`, `labels` and the loss `mask` are [b, s]."""

    def cut(whole: torch.Tensor) -> torch.Tensor:
        return shard(whole, cp, rank).contiguous()

    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    later = (F.pad(mask[:, depth:], (0, depth)) for depth in range(1, mtp_layers + 1))
    return MicroBatch(
        ids=cut(ids),
        labels=cut(labels),
        loss_mask=cut(mask),
        position_ids=cut(positions),
        mtp_masks=tuple(cut(mask) for mask in later),
        rows=ids.shape[0],
        sequence_length=ids.shape[1],
    )


def from_packing(
    ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, packing: Packing, *, mtp_layers: int
) -> MicroBatch:
    """A packed micro-batch: `ids`, `labels` and the loss `mask` are concatenated [t], as in `packing`.

    In the layout bshd it is rows of one padded length.
    """
    rows, length = packing.shape
    return MicroBatch(
        ids=packing.pack(ids),
        labels=packing.pack(labels),
        loss_mask=packing.pack(mask),
        position_ids=packing.positions,
        mtp_masks=tuple(packing.pack(mask, roll=depth) for depth in range(1, mtp_layers + 1)),
        rows=rows,
        sequence_length=length * packing.alignment.cp,
        packed=packed_seq_params(packing) if packing.layout == "thd" else None,
        packing=packing,
    )
