"""Decide how far sequences are padded, for ids, labels, masks, positions, temperatures and routes alike."""

from collections.abc import Sequence
from math import gcd, lcm
from typing import Literal, NamedTuple

from bundle.errors import JobFailed
from bundle.fp8 import SCALINGS, Scaling

Layout = Literal["thd", "bshd"]


class Padding(NamedTuple):
    """The lengths of one micro-batch before and after padding; all in tokens."""

    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]
    tail_rows: int  # one more sequence, of padding only, that ends a thd pack; 0: none

    @property
    def real_tokens(self) -> int:
        """The real tokens of all sequences."""
        return sum(self.lengths)

    @property
    def padded_lengths_with_tail(self) -> tuple[int, ...]:
        """The rows of each sequence that an attention kernel sees: the padded ones, then the tail if any."""
        return (*self.padded_lengths, self.tail_rows) if self.tail_rows else self.padded_lengths

    @property
    def total_rows_over_cp_ranks(self) -> int:
        """The rows of the padded buffer, over all context-parallel ranks."""
        return sum(self.padded_lengths_with_tail)

    @property
    def longest_kernel_sequence_rows(self) -> int:
        """The rows of the longest sequence that an attention kernel sees."""
        return max(self.padded_lengths_with_tail)


class Alignment(NamedTuple):
    """The multiples that padded lengths keep on one parallel layout.

    `cp` is the size of the group that shares these sequences. With dynamic context parallelism each
    micro-batch has a new one. The FP8 multiple holds on every rank by itself: this is measured on one device
    and assumed over several.
    """

    layout: Layout = "thd"
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    scaling: Scaling | None = None

    @property
    def sequence_multiple(self) -> int:
        """The multiple of every padded sequence.

        Zigzag gives each rank two of 2·cp equal chunks of every sequence. A bshd sequence is also split over
        the sequence-parallel ranks. A thd pack is split there as a whole, so only its total has that
        multiple.
        """
        chunks = 1 if self.cp == 1 else 2 * self.cp
        return lcm(chunks, self._sequence_shard_count) if self.layout == "bshd" else chunks

    @property
    def length_multiple_without_fp8(self) -> int:
        """The multiple of a length that a job gives to every sequence or pack, without FP8.

        With it all ranks get equal numbers of rows.
        """
        return lcm(self.sequence_multiple, self._sequence_shard_count)

    @property
    def total_multiple(self) -> int:
        """The multiple of all rows together, over all ranks."""
        rows = self._sequence_shard_count * (SCALINGS[self.scaling].row_multiple if self.scaling else 1)
        return lcm(self.sequence_multiple, rows)

    def pad(self, lengths: Sequence[int], *, length: int | None = None) -> Padding:
        """Return the least padding of these sequences.

        `length` forces the extent: of the total in thd, of each sequence in bshd.

        In thd each sequence is padded to its own multiple, and one more sequence of padding fills the total.
        The total is a multiple of the sequences' multiple; therefore that tail is one too, and it always
        fits. Rows beyond the last boundary would be refused by the rotary embedding (split_with_sizes). Rows
        added to a real sequence would make attention over it longer.

        Raise JobFailed for no sequences, for lengths that are not ints from 1, and for more rows than
        `length` holds.
        """
        lengths = tuple(lengths)
        _check_sequence_lengths(lengths)
        if self.layout == "bshd":
            count = len(lengths)
            multiple = lcm(self.sequence_multiple, self.total_multiple // gcd(self.total_multiple, count))
            extent = self._compute_extent(max(lengths), length, multiple)
            return Padding(lengths, (extent,) * count, 0)
        multiple = self.sequence_multiple
        padded = tuple([-(-n // multiple) * multiple for n in lengths])
        used = sum(padded)
        return Padding(lengths, padded, self._compute_extent(used, length, self.total_multiple) - used)

    @property
    def _sequence_shard_count(self) -> int:
        """The ranks that hold different rows of one pack."""
        return self.cp * (self.tp if self.sequence_parallel else 1)

    def _compute_extent(self, used: int, forced: int | None, multiple: int) -> int:
        """Return `used`, or the forced length, rounded up to the multiple."""
        extent = -(-(used if forced is None else forced) // multiple) * multiple
        if extent < used:
            unpacked, packed = "A micro-batch has a sequence of", "The sequences of a packed micro-batch have"
            raise JobFailed(
                f"{unpacked if self.layout == 'bshd' else packed} {used} tokens, but `length` allows"
                f" {extent}. Raise `length`, or put fewer or shorter sequences into a micro-batch."
            )
        return extent


def _check_sequence_lengths(lengths: tuple[int, ...]) -> None:
    if not lengths:
        raise JobFailed("A micro-batch has no sequences. Add at least one.")
    # Exactly int: True is not a length, and a tensor's value would have to be read from its device.
    wrong = [f"sequence {i}: {n!r}" for i, n in enumerate(lengths) if type(n) is not int or n < 1]
    if wrong:
        raise JobFailed(
            "Lengths of sequences must be integers from 1, on the host. Correct or remove:", wrong
        )
