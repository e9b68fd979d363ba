"""The gather indices of a pack and of the way back; host integers only.

`lengths`: the real tokens of every sequence; a tail is one more sequence with 0.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bundle.sequences.packing.runs import Ints, Runs, interleave, ramp, starts


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
