"""One micro-batch as a model chunk reads it: cut for this context-parallel rank, with its MTP masks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from bundle.engine.routes import Routes
from bundle.mcore.groups import Groups
from bundle.mcore.packed_sequences import build_packed_seq_params
from bundle.packing.images import ImageInputs
from bundle.packing.packing import Packing
from bundle.recipe import Recipe
from bundle.recipe.alignment import Alignment

Mean = Literal["token", "sequence"]  # of what the loss is a mean


@dataclass(frozen=True)
class MicroBatch:
    """Tensors on the rank's device, [b, s / cp] (packed: [1, t / cp]).

    `loss_mask` is the weight of each token's loss, `mtp_masks[k]` that of MTP depth k: 0 or 1; for a mean
    over sequences divided by the learned tokens of the sequence. `learned_tokens` are the learned ones of
    this rank, `learned_sequences` those that have some, counted on one context-parallel rank (None: a mean
    over tokens). `temperature` divides the logits for an objective, which may also read `extra_tensors`,
    tensors cut like the ids and 0 where the loss has no weight.
    `sequence_length` [tokens] and `rows` are those of the whole micro-batch before it was cut, `input_shape`
    is what the ids had that it was made from. `packed_seq_params` is megatron's PackedSeqParams, or None in
    bshd, which rows of equal length are as well. `routes` are what the routers choose, None: as they like.
    `images` are those of a model that sees some; positions then are three, as `ImageInputs.pack` has them.
    `reference_log_probs` is the log-probability [sequences], float32, that a reference gives each of the
    sequences of pairs. An objective does not see a micro-batch that `is_blank`.
    """

    ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    mtp_masks: tuple[Tensor, ...]
    rows: int
    sequence_length: int
    input_shape: tuple[int, ...]
    learned_tokens: Tensor
    packing: Packing
    learned_sequences: Tensor | None = None
    packed_seq_params: Any | None = None
    routes: Routes | None = None
    images: ImageInputs | None = None
    temperature: Tensor | None = None
    reference_log_probs: Tensor | None = None
    extra_tensors: Mapping[str, Tensor] = field(default_factory=dict)
    is_blank: bool = False

    @cached_property
    def token_count_and_weight_sums(self) -> Tensor:
        """[tokens, weight of the main loss, weight of each MTP depth] of this rank, float32."""
        masks = (self.loss_mask, *self.mtp_masks)
        return torch.stack([self.learned_tokens.float(), *(mask.sum() for mask in masks)])

    def join_gathered_shards(self, shards: Tensor) -> Tensor:
        """Return a tensor in the order that the micro-batch was made from, unpadded: [t, ...] or [b, s, ...].

        `shards` are the parts of all context-parallel ranks, one after the other: [cp * b, s / cp, ...].
        """
        return self.packing.unpack_gathered_shards(shards).unflatten(0, self.input_shape)


def from_rows(
    ids: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    *,
    cp: int,
    rank: int,
    mtp_layers: int,
    mean: Mean = "token",
    temperatures: Tensor | None = None,
    extra_tensors: Mapping[str, Tensor] | None = None,
    images: ImageInputs | None = None,
) -> MicroBatch:
    """Return a micro-batch of rows of equal length.

    `ids`, `labels`, the 0/1 mask and `extra_tensors` are [b, s]; `temperatures` [b] has one for each row.
    Rows that the ranks cannot share evenly are padded. `images` are those of the rows, one after the other.
    """
    rows, length = ids.shape
    alignment = Alignment("bshd", cp=cp)
    packing = Packing.from_lengths([length] * rows, alignment, rank=rank, length=length, device=ids.device)
    micro_batch = from_packing(
        ids.flatten(),
        labels.flatten(),
        loss_mask.flatten(),
        packing,
        mtp_layers=mtp_layers,
        mean=mean,
        temperatures=temperatures,
        extra_tensors={name: value.flatten(0, 1) for name, value in (extra_tensors or {}).items()},
        images=images,
    )
    return replace(micro_batch, input_shape=(rows, length))


def from_packing(
    ids: Tensor,
    labels: Tensor,
    mask: Tensor,
    packing: Packing,
    *,
    mtp_layers: int,
    mean: Mean = "token",
    temperatures: Tensor | None = None,
    extra_tensors: Mapping[str, Tensor] | None = None,
    images: ImageInputs | None = None,
) -> MicroBatch:
    """Return a packed micro-batch.

    `ids`, `labels`, the 0/1 `mask` and `extra_tensors` are concatenated [t, ...]; `temperatures` [b] has one
    for each sequence. In the layout bshd the micro-batch is rows of one padded length.
    """
    weights, sequences = mask, None
    if mean == "sequence":
        learned = packing.sum_concatenated_by_sequence(mask)
        weights = mask / packing.repeat_per_token(learned.clamp(min=1))
        sequences = (learned > 0).sum().int() * (packing.rank == 0)  # counted on the first rank only
    rows, length = packing.local_shape
    images = images and images.pack(packing)
    loss_mask = packing.pack_concatenated_tokens(weights)
    return MicroBatch(
        ids=packing.pack_concatenated_tokens(ids),
        labels=packing.pack_concatenated_tokens(labels),
        loss_mask=loss_mask,
        position_ids=packing.local_positions if images is None else images.positions,
        mtp_masks=tuple(
            packing.pack_concatenated_tokens(weights, roll=depth) for depth in range(1, mtp_layers + 1)
        ),
        rows=rows,
        sequence_length=length * packing.alignment.cp,
        input_shape=tuple(ids.shape),
        learned_tokens=packing.pack_concatenated_tokens(mask).sum().int(),
        learned_sequences=sequences,
        packed_seq_params=build_packed_seq_params(packing) if packing.qkv_format == "thd" else None,
        packing=packing,
        images=images,
        temperature=None if temperatures is None else packing.repeat_per_packed_row(temperatures, fill=1),
        extra_tensors={
            name: _zero_unlearned_values(packing.pack_concatenated_tokens(value), loss_mask > 0)
            for name, value in (extra_tensors or {}).items()
        },
    )


def build_blanks(recipe: Recipe, groups: Groups, device: torch.device, mean: Mean) -> list[MicroBatch]:
    """Return micro-batches of one token that is not learned, for a rank that has nothing to run.

    They pass through the model as others do: one, or as many as interleaved pipeline stages take at least.
    """
    packing = Packing.from_lengths([1], recipe.alignment, rank=groups.cp.rank, device=device)
    ids = torch.zeros(1, dtype=torch.int64, device=device)
    mask = torch.zeros(1, device=device)
    blank = from_packing(ids, ids, mask, packing, mtp_layers=recipe.architecture.mtp_layers, mean=mean)
    return [replace(blank, is_blank=True)] * (groups.pp.size if groups.vpp > 1 else 1)


def _zero_unlearned_values(values: Tensor, is_learned: Tensor) -> Tensor:
    """Return the values [b, s, ...] of learned tokens, 0 elsewhere: there they may be anything, even NaN."""
    return values.where(is_learned.view(*is_learned.shape, *[1] * (values.dim() - is_learned.dim())), 0)
