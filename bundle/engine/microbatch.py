"""One micro-batch as a model chunk reads it: cut for this context-parallel rank, with its MTP masks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from bundle.engine.routes import Routes
from bundle.mcore.groups import Groups
from bundle.mcore.packed import packed_seq_params
from bundle.recipe import Recipe
from bundle.recipe.alignment import Alignment
from bundle.sequences.images import Images
from bundle.sequences.packing import Packing

Mean = Literal["token", "sequence"]  # of what the loss is a mean


@dataclass(frozen=True)
class MicroBatch:
    """Tensors on the rank's device, [b, s / cp] (packed: [1, t / cp]).

    `loss_mask` is the weight of each token's loss, `mtp_masks[k]` that of MTP depth k: 0 or 1; for a mean
    over sequences divided by the learned tokens of the sequence. `tokens` are the learned ones of this rank,
    `sequences` those that have some, counted on one context-parallel rank (None: a mean over tokens).
    `temperature` divides the logits for an objective, which may also read `values`, tensors cut like the ids
    and 0 where the loss has no weight.
    `sequence_length` [tokens] and `rows` are those of the whole micro-batch before it was cut, `shape` is
    what the ids had that it was made from. `packed` is megatron's PackedSeqParams, or None in bshd, which
    rows of equal length are as well. `routes` are what the routers choose, None: as they like. `images` are
    those of a model that sees some; positions then are three, as `Images.packed` has them. `reference` is the
    log-probability [sequences], float32, that a reference gives each of the sequences of pairs. An objective
    does not see a micro-batch that `is_blank`.
    """

    ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    mtp_masks: tuple[Tensor, ...]
    rows: int
    sequence_length: int
    shape: tuple[int, ...]
    tokens: Tensor
    packing: Packing
    sequences: Tensor | None = None
    packed: Any | None = None
    routes: Routes | None = None
    images: Images | None = None
    temperature: Tensor | None = None
    reference: Tensor | None = None
    values: Mapping[str, Tensor] = field(default_factory=dict)
    is_blank: bool = False

    @cached_property
    def weights(self) -> Tensor:
        """[tokens, weight of the main loss, weight of each MTP depth] of this rank, float32."""
        masks = (self.loss_mask, *self.mtp_masks)
        return torch.stack([self.tokens.float(), *(mask.sum() for mask in masks)])

    def whole(self, shards: Tensor) -> Tensor:
        """A tensor in the order that the micro-batch was made from, unpadded: [t, ...] or [b, s, ...].

        `shards` are those of all context-parallel ranks, one after the other: [cp * b, s / cp, ...].
        """
        return self.packing.unpack(shards).unflatten(0, self.shape)


def from_rows(
    ids: Tensor,
    labels: Tensor,
    mask: Tensor,
    *,
    cp: int,
    rank: int,
    mtp_layers: int,
    mean: Mean = "token",
    temperatures: Tensor | None = None,
    values: Mapping[str, Tensor] | None = None,
    images: Images | None = None,
) -> MicroBatch:
    """A micro-batch of rows of equal length: `ids`, `labels`, the loss `mask` (0 or 1), `values` are [b, s].

    `temperatures` [b] are one for each row. Rows that the ranks cannot share out evenly are padded. `images`
    are those of the rows one after the other.
    """
    rows, length = ids.shape
    alignment = Alignment("bshd", cp=cp)
    packing = Packing.of([length] * rows, alignment, rank=rank, length=length, device=ids.device)
    made = from_packing(
        ids.flatten(),
        labels.flatten(),
        mask.flatten(),
        packing,
        mtp_layers=mtp_layers,
        mean=mean,
        temperatures=temperatures,
        values={name: value.flatten(0, 1) for name, value in (values or {}).items()},
        images=images,
    )
    return replace(made, shape=(rows, length))


def from_packing(
    ids: Tensor,
    labels: Tensor,
    mask: Tensor,
    packing: Packing,
    *,
    mtp_layers: int,
    mean: Mean = "token",
    temperatures: Tensor | None = None,
    values: Mapping[str, Tensor] | None = None,
    images: Images | None = None,
) -> MicroBatch:
    """A packed micro-batch: `ids`, `labels`, the loss `mask` (0 or 1) and `values` are concatenated [t, ...].

    `temperatures` [b] are one for each sequence. In the layout bshd it is rows of one padded length.
    """
    weights, sequences = mask, None
    if mean == "sequence":
        learned = packing.sums(mask)
        weights = mask / packing.repeat(learned.clamp(min=1))
        sequences = (learned > 0).sum().int() * (packing.rank == 0)  # counted on the first rank only
    rows, length = packing.shape
    images = images and images.packed(packing)
    loss_mask = packing.pack(weights)
    return MicroBatch(
        ids=packing.pack(ids),
        labels=packing.pack(labels),
        loss_mask=loss_mask,
        position_ids=packing.positions if images is None else images.positions,
        mtp_masks=tuple(packing.pack(weights, roll=depth) for depth in range(1, mtp_layers + 1)),
        rows=rows,
        sequence_length=length * packing.alignment.cp,
        shape=tuple(ids.shape),
        tokens=packing.pack(mask).sum().int(),
        sequences=sequences,
        packed=packed_seq_params(packing) if packing.layout == "thd" else None,
        packing=packing,
        images=images,
        temperature=None if temperatures is None else packing.spread(temperatures, fill=1),
        values={name: _select(packing.pack(value), loss_mask > 0) for name, value in (values or {}).items()},
    )


def build_blanks(recipe: Recipe, groups: Groups, device: torch.device, mean: Mean) -> list[MicroBatch]:
    """Return micro-batches of one token that is not learned, for a rank that has nothing to run.

    They pass through the model as others do: one, or as many as interleaved pipeline stages take at least.
    """
    packing = Packing.of([1], recipe.alignment, rank=groups.cp.rank, device=device)
    ids = torch.zeros(1, dtype=torch.int64, device=device)
    mask = torch.zeros(1, device=device)
    blank = from_packing(ids, ids, mask, packing, mtp_layers=recipe.architecture.mtp_layers, mean=mean)
    return [replace(blank, is_blank=True)] * (groups.pp.size if groups.vpp > 1 else 1)


def _select(values: Tensor, is_learned: Tensor) -> Tensor:
    """Return the values [b, s, ...] of learned tokens, 0 elsewhere: there they may be anything, even NaN."""
    return values.where(is_learned.view(*is_learned.shape, *[1] * (values.dim() - is_learned.dim())), 0)
