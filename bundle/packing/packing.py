"""Packing of sequences for one context-parallel rank, and back; shards of tensors that are not packed.

A rank holds a few runs: stretches of consecutive rows of one sequence. Everything about a pack is computed
from them with host integers, then by one `repeat` to the length of the pack: no step handles one sequence at
a time. `lengths` are the real tokens of every sequence; a tail is one more sequence with 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bundle.capabilities import ModelInputMask
from bundle.errors import JobFailed
from bundle.recipe.alignment import Alignment, Layout, Padding
from bundle.transfers import copy_to_device

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class RankRowRanges:
    """The rows of one rank in its order: for each run, rows start, start+1, ... of a sequence; [runs]."""

    sequence: Ints
    start: Ints
    rows: Ints

    def concatenate_ranges(self, first: Ints) -> Ints:
        """Return numbers for every row that begin at `first[run]` and count up within each run."""
        return concatenate_ranges(first, self.rows)


def compute_starts(lengths: Ints) -> Ints:
    """Return where each of these stretches begins when they follow each other."""
    return np.cumsum(lengths) - lengths


def concatenate_ranges(first: Ints, rows: Ints) -> Ints:
    """Return first[i], first[i]+1, ... (rows[i] of them) for each i, one after the other."""
    numbers: Ints = np.repeat(first - compute_starts(rows), rows)
    numbers += np.arange(len(numbers))
    return numbers


def interleave(first: Ints, second: Ints) -> Ints:
    """Return first[0], second[0], first[1], second[1], ..."""
    return np.ravel((first, second), order="F")


def compute_runs(padded: Ints, cp: int, rank: int) -> RankRowRanges:
    """Return the runs of `rank` of `cp`; `padded`: the rows of every sequence, the tail included."""
    sequence = np.arange(len(padded), dtype=np.int64)
    if cp == 1:
        return RankRowRanges(sequence, np.zeros_like(padded), padded)
    chunk = padded // (2 * cp)
    start = interleave(rank * chunk, (2 * cp - 1 - rank) * chunk)
    return RankRowRanges(np.repeat(sequence, 2), start, np.repeat(chunk, 2))


def build_pack_index_and_blanks(
    runs: RankRowRanges, lengths: Ints, roll: int
) -> tuple[Ints, NDArray[np.bool_] | None]:
    """Return for every row the token that it takes, and a mask of the rows that take none; [t/cp].

    A row takes the token `roll` places further in its own sequence. The mask is None where every row takes
    one.
    """
    real = _count_real_rows(runs, lengths, roll)
    index = runs.concatenate_ranges(compute_starts(lengths)[runs.sequence] + runs.start + roll)
    np.minimum(index, lengths.sum() - 1, out=index)  # rows that take nothing must still name a token
    if real.sum() == len(index):
        return index, None
    blank = np.tile((False, True), len(real))
    return index, np.repeat(blank, interleave(real, runs.rows - real))


def build_unpack_index(shards: Sequence[RankRowRanges], lengths: Ints) -> Ints:
    """Return for every token its row when the shards of all ranks follow each other; [tokens]."""
    columns = zip(*((runs.sequence, runs.start, runs.rows) for runs in shards), strict=True)
    runs = RankRowRanges(*(np.concatenate(column) for column in columns))
    order = np.argsort(compute_starts(lengths)[runs.sequence] + runs.start, kind="stable")
    return concatenate_ranges(compute_starts(runs.rows)[order], _count_real_rows(runs, lengths, 0)[order])


def _count_real_rows(runs: RankRowRanges, lengths: Ints, roll: int) -> Ints:
    """Return how many rows of each run take a token; these are its first rows."""
    left: Ints = lengths[runs.sequence] - runs.start - roll
    taken: Ints = np.minimum(np.maximum(left, 0), runs.rows)  # which types differ between numpy 1 and 2
    return taken


@dataclass(frozen=True)
class Packing:
    """The plan of one micro-batch: built once from host lengths, then used for every tensor of it.

    Tensors come in and go out *concatenated*: [tokens, ...], the sequences one after the other, unpadded.
    Packed, they are in the form that a model takes on this rank: [1, t/cp, ...] in thd, [b, s/cp, ...] in
    bshd. Each direction is one gather, whatever the number of sequences; nothing is read back from the
    device.
    """

    padding: Padding
    alignment: Alignment
    rank: int
    device: torch.device

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        alignment: Alignment,
        *,
        rank: int | None = None,
        length: int | None = None,
        device: torch.device | str = "cpu",
    ) -> "Packing":
        """Return the packing of sequences with these lengths (host ints) for a context-parallel rank.

        `length` forces the padded extent (`Alignment.pad`). Raise JobFailed if they cannot be packed.
        """
        if rank is None and alignment.cp > 1:
            raise JobFailed(
                f"rank: packing for {alignment.cp} context-parallel ranks needs the rank. Give `rank`."
            )
        if not 0 <= (rank or 0) < alignment.cp:
            raise JobFailed(f"rank: {rank} is not a context-parallel rank from 0 to {alignment.cp - 1}.")
        return cls(alignment.pad(lengths, length=length), alignment, rank or 0, torch.device(device))

    def pack_concatenated_tokens(self, x: Tensor, *, fill: float | Tensor = 0, roll: int = 0) -> Tensor:
        """Return this rank's packed rows of a concatenated tensor [tokens, ...]: shape [*self.shape, ...].

        `roll` takes the value `roll` tokens later in the same sequence: 1 makes labels from ids, 1 + d those
        of MTP depth d. `fill` is the value of rows without a token, in padding and at the end of a rolled
        sequence: a number, or a tensor that broadcasts to the result.
        """
        if x.shape[0] != self.padding.real_tokens:
            raise JobFailed(
                f"A tensor of shape {list(x.shape)} does not fit this micro-batch: its first dimension must"
                f" be the {self.padding.real_tokens} tokens of the sequences."
            )
        index, blank = self._get_pack_index_and_blanks(roll)
        return self._fill_blanks(x.index_select(0, index), blank, fill)

    def repeat_per_packed_row(self, values: Tensor, *, fill: float | Tensor = 0) -> Tensor:
        """Return this rank's packed rows of one value for each sequence [b, ...], such as temperatures."""
        if values.shape[0] != len(self.padding.lengths):
            raise JobFailed(
                f"A tensor of shape {list(values.shape)} does not have one value for each of this"
                f" micro-batch's {len(self.padding.lengths)} sequences."
            )
        owner = np.minimum(self._local_runs.sequence, len(self.padding.lengths) - 1)
        index = self._to_tensor(np.repeat(owner, self._local_runs.rows))
        return self._fill_blanks(values.index_select(0, index), self._get_pack_index_and_blanks(0)[1], fill)

    def unpack_gathered_shards(self, x: Tensor) -> Tensor:
        """Return the concatenated tensor [tokens, ...] of the packed rows of all ranks: [cp·b, s/cp, ...].

        All ranks' shards follow each other in the first dimension, as all_gather_into_tensor leaves them.
        """
        rows, columns = self.local_shape
        if x.shape[:2] != (self.alignment.cp * rows, columns):
            raise JobFailed(
                f"A tensor of shape {list(x.shape)} is not the packed form of this micro-batch: its first"
                f" dimensions must be [{self.alignment.cp * rows}, {columns}], the shards of all ranks."
            )
        return x.flatten(0, 1).index_select(0, self._packed_row_by_token)

    def split_concatenated(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return one view for each sequence of a concatenated tensor."""
        views: tuple[Tensor, ...] = x.split(self.padding.lengths)
        return views

    def sum_concatenated_by_sequence(self, x: Tensor) -> Tensor:
        """Return the sum of a concatenated tensor [tokens, ...] over each sequence: [b, ...]."""
        empty = x.new_zeros(len(self.padding.lengths), *x.shape[1:])
        return empty.index_add(0, self._sequence_index_by_token, x)

    def repeat_per_token(self, values: Tensor) -> Tensor:
        """Return the concatenated tensor [tokens, ...] of one value for each sequence [b, ...]."""
        return values.index_select(0, self._sequence_index_by_token)

    @property
    def qkv_format(self) -> Layout:
        """The layout of packed tensors: thd or bshd."""
        return self.alignment.layout

    @property
    def local_shape(self) -> tuple[int, int]:
        """The first two dimensions of a packed tensor on this rank."""
        rows = 1 if self.qkv_format == "thd" else len(self.padding.lengths)
        return rows, self.padding.total_rows_over_cp_ranks // (self.alignment.cp * rows)

    @cached_property
    def local_positions(self) -> Tensor:
        """The place of every row in its own sequence, counting on over padding; int64, `shape`."""
        return self._to_tensor(self._local_runs.concatenate_ranges(self._local_runs.start)).view(
            self.local_shape
        )

    @cached_property
    def valid(self) -> Tensor:
        """True where a row is a real token; bool, `shape`."""
        blank = self._get_pack_index_and_blanks(0)[1]
        all_valid = torch.ones(self.local_shape, dtype=torch.bool, device=self.device)
        return all_valid if blank is None else ~blank.view(self.local_shape)

    @cached_property
    def unsharded_bshd_packing(self) -> "Packing":
        """The same sequences as rows [b, s] of one length, whole on every rank.

        A vision-language model takes this form, in thd too: it looks for its image tokens in such rows and
        packs by itself. In bshd the rows are as long as those of this packing, and ids, labels and masks fit.
        """
        count, extent = len(self.padding.lengths), max(self.padding.padded_lengths)
        rows = Padding(self.padding.lengths, (extent,) * count, 0)
        return Packing(rows, Alignment(layout="bshd"), 0, self.device)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Boundaries of the real lengths over all ranks; int32.

        The tail counts in full, as if its rows were real: no kernel sees an empty sequence.
        """
        tail = (self.padding.tail_rows,) if self.padding.tail_rows else ()
        return self._compute_boundaries((*self.padding.lengths, *tail))

    @cached_property
    def cu_seqlens_padded(self) -> Tensor:
        """Boundaries of the padded sequences over all ranks; int32, the last one is all rows."""
        return self._compute_boundaries(self.padding.padded_lengths_with_tail)

    @cached_property
    def _local_runs(self) -> RankRowRanges:
        return self._compute_runs(self.rank)

    def _compute_runs(self, rank: int) -> RankRowRanges:
        return compute_runs(np.asarray(self.padding.padded_lengths_with_tail), self.alignment.cp, rank)

    @cached_property
    def _lengths_with_empty_tail(self) -> Ints:
        """Real tokens of each sequence; the tail is a sequence with none."""
        return np.asarray((*self.padding.lengths, 0))

    @cached_property
    def _sequence_index_by_token(self) -> Tensor:
        """The sequence of every token; [tokens]."""
        return self._to_tensor(np.repeat(np.arange(len(self.padding.lengths)), self.padding.lengths))

    @cached_property
    def _pack_index_by_roll(self) -> dict[int, tuple[Tensor, Tensor | None]]:
        return {}

    def _get_pack_index_and_blanks(self, roll: int) -> tuple[Tensor, Tensor | None]:
        """Return `build_pack_index_and_blanks` on the device, computed once for each roll."""
        if roll < 0:
            raise JobFailed(f"roll: {roll} is not allowed. Use 0 or more, which rolls towards the beginning.")
        if roll not in self._pack_index_by_roll:
            index, blank = build_pack_index_and_blanks(self._local_runs, self._lengths_with_empty_tail, roll)
            self._pack_index_by_roll[roll] = (
                self._to_tensor(index),
                None if blank is None else self._to_tensor(blank),
            )
        return self._pack_index_by_roll[roll]

    @cached_property
    def _packed_row_by_token(self) -> Tensor:
        shards = [self._compute_runs(rank) for rank in range(self.alignment.cp)]
        return self._to_tensor(build_unpack_index(shards, self._lengths_with_empty_tail))

    def _fill_blanks(self, rows: Tensor, blank: Tensor | None, fill: float | Tensor) -> Tensor:
        packed = rows.view(*self.local_shape, *rows.shape[1:])
        if blank is None:
            return packed
        blank = blank.view(*self.local_shape, *[1] * (rows.dim() - 1))
        if isinstance(fill, Tensor):
            return torch.where(blank, fill.to(rows.dtype), packed)
        return packed.masked_fill(blank, fill)

    def _compute_boundaries(self, lengths: tuple[int, ...]) -> Tensor:
        return self._to_tensor(np.cumsum((0, *lengths), dtype=np.int32))

    def _to_tensor(self, values: np.ndarray) -> Tensor:
        return copy_to_device(torch.from_numpy(values), self.device)


def shard(x: Tensor, cp: int, rank: int) -> Tensor:
    """Return the chunks rank and 2·cp-1-rank of the 2·cp of a tensor [b, s, ...]: [b, s/cp, ...].

    With a causal mask late rows cost more than early ones; pairing them gives every rank the same work.
    Megatron's attention expects this order (megatron.core.utils.get_batch_on_this_cp_rank).
    """
    if cp == 1:
        return x
    if x.shape[1] % (2 * cp):
        raise JobFailed(
            f"{x.shape[1]} rows cannot be divided over {cp} context-parallel ranks. Pad them to a multiple"
            f" of {2 * cp} (recipe.alignment)."
        )
    chunks = x.chunk(2 * cp, 1)
    return torch.cat((chunks[rank], chunks[-1 - rank]), 1)


@dataclass(frozen=True)
class Masks:
    """The masks of a micro-batch's padding.

    `model` goes into the model: None, or bool [b, s] over whole sequences, True = token. `valid` belongs to
    the rows that come out, for post-processing, whatever the model was given: bool, `Packing.local_shape`,
    True = token. A backend that gives its models no mask must not take it from post-processing too.
    """

    model: Tensor | None
    valid: Tensor


def build_model_and_output_masks(packing: Packing, mask: ModelInputMask) -> Masks:
    """Return the masks of a packing for a model that takes `mask` (Capabilities.find_mask)."""
    return Masks(packing.unsharded_bshd_packing.valid if mask.form == "valid" else None, packing.valid)
