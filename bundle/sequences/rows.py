"""Which rows of a pack a context-parallel rank holds, and the gather indices into it and out of it.

What a rank holds is a few runs: stretches of consecutive rows of one sequence. Everything about a pack is
arithmetic on them, then one `repeat` to the length of the pack: no step looks at one sequence at a time. Host
integers only. `lengths` are the real tokens of every sequence; a tail is one more sequence with 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Runs:
    """The rows of one rank in its order: for each run, rows start, start+1, ... of a sequence; [runs]."""

    sequence: Ints
    start: Ints
    rows: Ints

    def ramp(self, first: Ints) -> Ints:
        """Numbers for every row that begin at `first[run]` and count up within each run."""
        return ramp(first, self.rows)


def starts(lengths: Ints) -> Ints:
    """Where each of these stretches begins when they follow each other."""
    return np.cumsum(lengths) - lengths


def ramp(first: Ints, rows: Ints) -> Ints:
    """first[i], first[i]+1, ... (rows[i] of them) for each i, one after the other."""
    numbers: Ints = np.repeat(first - starts(rows), rows)
    numbers += np.arange(len(numbers))
    return numbers


def interleave(first: Ints, second: Ints) -> Ints:
    """first[0], second[0], first[1], second[1], ..."""
    return np.ravel((first, second), order="F")


def runs_of(padded: Ints, cp: int, rank: int) -> Runs:
    """The runs of `rank` of `cp`; `padded`: the rows of every sequence, the tail included."""
    sequence = np.arange(len(padded), dtype=np.int64)
    if cp == 1:
        return Runs(sequence, np.zeros_like(padded), padded)
    chunk = padded // (2 * cp)
    start = interleave(rank * chunk, (2 * cp - 1 - rank) * chunk)
    return Runs(np.repeat(sequence, 2), start, np.repeat(chunk, 2))


def pack_index(runs: Runs, lengths: Ints, roll: int) -> tuple[Ints, NDArray[np.bool_] | None]:
    """For every row, the token that it takes, and where it takes none (None: every row takes one); [t/cp].

    A row takes the token `roll` places further in its own sequence.
    """
    real = _real(runs, lengths, roll)
    index = runs.ramp(starts(lengths)[runs.sequence] + runs.start + roll)
    np.minimum(index, lengths.sum() - 1, out=index)  # rows that take nothing must still name a token
    if real.sum() == len(index):
        return index, None
    blank = np.tile((False, True), len(real))
    return index, np.repeat(blank, interleave(real, runs.rows - real))


def unpack_index(shards: Sequence[Runs], lengths: Ints) -> Ints:
    """For every token, its row when the shards of all ranks follow each other; [tokens]."""
    columns = zip(*((runs.sequence, runs.start, runs.rows) for runs in shards), strict=True)
    runs = Runs(*(np.concatenate(column) for column in columns))
    order = np.argsort(starts(lengths)[runs.sequence] + runs.start, kind="stable")
    return ramp(starts(runs.rows)[order], _real(runs, lengths, 0)[order])


def _real(runs: Runs, lengths: Ints, roll: int) -> Ints:
    """How many rows of each run, its first ones, take a token."""
    left: Ints = lengths[runs.sequence] - runs.start - roll
    taken: Ints = np.minimum(np.maximum(left, 0), runs.rows)  # which types differ between numpy 1 and 2
    return taken
