"""A packing against a per-sequence reference, for any lengths, parallel layout and FP8 scaling."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bundle.errors import JobFailed
from bundle.sequences.alignment import FP8_ROWS, Alignment
from bundle.sequences.packing import Packing
from tests.sequences.reference import padded_buffer, shard_of

SIZES = st.sampled_from((1, 2, 4, 8))
ALIGNMENTS = st.builds(
    Alignment,
    layout=st.sampled_from(("thd", "bshd")),
    tp=SIZES,
    cp=SIZES,
    sequence_parallel=st.booleans(),
    scaling=st.sampled_from((None, *FP8_ROWS)),
    cp_layout=st.sampled_from(("zigzag", "contiguous")),
    bucket=st.sampled_from((1, 1, 24, 512)),
)
LENGTHS = st.one_of(
    st.lists(st.integers(1, 64), min_size=1, max_size=512),
    st.lists(st.integers(1, 4096), min_size=1, max_size=12),
)


def ranks(lengths, alignment, **options):
    return [Packing.of(lengths, alignment, rank=r, **options) for r in range(alignment.cp)]


@settings(deadline=None, max_examples=200)
@given(LENGTHS, ALIGNMENTS, st.sampled_from((0, 0, 1, 2, 5)))
def test_every_rank_holds_its_shard_of_the_padded_buffer_and_unpacking_restores_the_tokens(
    lengths, alignment, roll
):
    packings = ranks(lengths, alignment)
    tokens = torch.arange(1, sum(lengths) + 1)
    buffer = padded_buffer(tokens, packings[0].padding, alignment.layout, roll=roll, fill=-7)
    shards = [p.pack(tokens, fill=-7, roll=roll) for p in packings]
    for rank, (packing, packed) in enumerate(zip(packings, shards, strict=True)):
        assert packed.shape == packing.shape
        assert torch.equal(packed, shard_of(buffer, packing.padding, alignment, rank))
    if roll == 0:
        assert torch.equal(packings[0].unpack(torch.cat(shards)), tokens)


@settings(deadline=None, max_examples=60)
@given(LENGTHS, ALIGNMENTS)
def test_positions_validity_and_boundaries(lengths, alignment):
    packings = ranks(lengths, alignment)
    padding = packings[0].padding
    counts = torch.cat([torch.arange(rows) for rows in padding.rows])
    real = torch.cat([torch.arange(n) for n in lengths])
    if alignment.layout == "bshd":
        counts = counts.view(len(lengths), -1)
    else:
        counts = counts.view(1, -1)
    for rank, packing in enumerate(packings):
        assert torch.equal(packing.positions, shard_of(counts, padding, alignment, rank))
        assert int(packing.cu_seqlens_padded[-1]) == packing.shape[0] * packing.shape[1] * alignment.cp
    assert sum(int(p.valid.sum()) for p in packings) == sum(lengths)
    everything = packings[0].unpack(torch.cat([p.positions for p in packings]))
    assert torch.equal(everything, real)
    assert packings[0].cu_seqlens_padded.diff().tolist() == list(padding.rows)
    assert packings[0].cu_seqlens.diff().tolist()[: len(lengths)] == lengths


def test_a_rank_must_be_named_and_exist():
    with pytest.raises(JobFailed, match="Give `rank`"):
        Packing.of([4], Alignment(cp=2))
    with pytest.raises(JobFailed, match="rank 2 is not one of"):
        Packing.of([4], Alignment(cp=2), rank=2)
