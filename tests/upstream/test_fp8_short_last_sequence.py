"""FP8 with context parallelism: the last sequence takes the padding of the whole pack, and is then cut by it.

verl (1dda039b9, preprocess_thd_engine) rounds the total up to 128 times the alignment by growing the last
sequence, and copies chunks of the grown length out of the sequence that was not grown. A chunk that is not
all there raises; a chunk of exactly one row is repeated over all of its place, silently.
"""

import pytest
import torch

from bundle.packing.packing import Packing
from bundle.recipe.alignment import Alignment


def first_chunk_of_last_sequence(length, cp, rank):
    """What the upstream loop writes for this rank; the whole pack is that sequence."""
    multiple = 2 * cp
    sequence = torch.arange(length)
    if length < 16:
        sequence = torch.nn.functional.pad(sequence, (0, 16 - length))
    rows = -(-length // (multiple * 128)) * multiple * 128
    chunk = rows // multiple
    place = torch.zeros(chunk, dtype=torch.int64)
    place[:] = sequence[rank * chunk : (rank + 1) * chunk]
    return place


@pytest.mark.parametrize(("length", "cp", "rank"), [(20, 2, 0), (100, 2, 0), (300, 4, 2)])
def test_short_sequences_are_packed(length, cp, rank):
    with pytest.raises(RuntimeError, match="must match"):
        first_chunk_of_last_sequence(length, cp, rank)
    packed = packed_by_all_ranks(length, cp)
    assert sorted(packed[packed >= 0].tolist()) == list(range(length))


def test_a_single_row_is_not_repeated():
    assert first_chunk_of_last_sequence(129, 2, rank=1).tolist() == [128] * 128
    assert (packed_by_all_ranks(129, 2) == 128).sum() == 1


def packed_by_all_ranks(length, cp):
    alignment = Alignment(cp=cp, scaling="blockwise")
    packings = [Packing.from_lengths([length], alignment, rank=rank) for rank in range(cp)]
    return torch.cat(
        [packing.pack_concatenated_tokens(torch.arange(length), fill=-1) for packing in packings]
    )
