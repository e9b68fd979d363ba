"""A packing against a per-sequence reference, for any lengths, parallel layout and FP8 scaling."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bundle.errors import JobFailed
from bundle.packing.packing import Packing
from bundle.recipe.alignment import Alignment
from tests.packing.reference import padded_buffer, shard_of
from tests.packing.strategies import ALIGNMENTS, LENGTHS, drawn

TRAILING = st.sampled_from(((), (), (3,), (2, 2)))
DTYPES = (torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float32)


def packings_of(lengths, alignment, **options):
    return [Packing.from_lengths(lengths, alignment, rank=r, **options) for r in range(alignment.cp)]


@settings(deadline=None, max_examples=300)
@given(LENGTHS, ALIGNMENTS, st.sampled_from((0, 0, 1, 2, 5)), TRAILING)
def test_ranks_hold_their_shards_of_the_padded_buffer_and_unpacking_restores_it(
    lengths, alignment, roll, trailing
):
    packings = packings_of(lengths, alignment)
    x = torch.arange(sum(lengths) * torch.Size(trailing).numel()).view(-1, *trailing)
    buffer = padded_buffer(x, packings[0].padding, alignment.layout, roll=roll, fill=-7)
    shards = [p.pack_concatenated_tokens(x, fill=-7, roll=roll) for p in packings]
    for rank, (packing, packed) in enumerate(zip(packings, shards, strict=True)):
        assert packed.shape == (*packing.local_shape, *trailing)
        assert torch.equal(packed, shard_of(buffer, packing.padding, alignment, rank))
    restored = packings[-1].unpack_gathered_shards(torch.cat(shards))
    if roll == 0:
        assert torch.equal(restored, x)
    for sequence, length in zip(packings[0].split_concatenated(restored), lengths, strict=True):
        assert (sequence[max(length - roll, 0) :] == -7).all()


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_the_largest_micro_batch(layout):
    alignment = Alignment(layout, 2, 4, True, "mxfp8")
    lengths = drawn(512, 4096 if layout == "thd" else 512, seed=1)
    packings = packings_of(lengths, alignment)
    x = torch.arange(sum(lengths))
    buffer = padded_buffer(x, packings[0].padding, layout, roll=0, fill=-7)
    shards = [p.pack_concatenated_tokens(x, fill=-7) for p in packings]
    for rank, packed in enumerate(shards):
        assert torch.equal(packed, shard_of(buffer, packings[0].padding, alignment, rank))
    assert torch.equal(packings[0].unpack_gathered_shards(torch.cat(shards)), x)


@settings(deadline=None, max_examples=60)
@given(LENGTHS, ALIGNMENTS)
def test_positions_validity_and_boundaries(lengths, alignment):
    packings = packings_of(lengths, alignment)
    padding = packings[0].padding
    counts = torch.cat([torch.arange(rows) for rows in padding.padded_lengths_with_tail])
    counts = counts.view(len(lengths) if alignment.layout == "bshd" else 1, -1)
    for rank, packing in enumerate(packings):
        assert torch.equal(packing.local_positions, shard_of(counts, padding, alignment, rank))
        assert int(packing.cu_seqlens_padded[-1]) == alignment.cp * packing.local_positions.numel()
    valid = torch.cat([p.valid for p in packings])
    assert int(valid.sum()) == sum(lengths)
    assert packings[0].unpack_gathered_shards(valid).all()
    assert packings[0].cu_seqlens_padded.diff().tolist() == list(padding.padded_lengths_with_tail)
    assert packings[0].cu_seqlens.diff().tolist() == [
        *lengths,
        *[padding.tail_rows] * bool(padding.tail_rows),
    ]
    assert packings[0].cu_seqlens.dtype == torch.int32


@settings(deadline=None, max_examples=60)
@given(LENGTHS, ALIGNMENTS)
def test_one_value_for_each_sequence_reaches_its_tokens_only(lengths, alignment):
    values = torch.arange(1.0, len(lengths) + 1)
    packings = packings_of(lengths, alignment)
    everywhere = torch.cat([p.repeat_per_packed_row(values, fill=-1) for p in packings])
    expected = torch.repeat_interleave(values, torch.tensor(lengths))
    assert torch.equal(packings[0].unpack_gathered_shards(everywhere), expected)
    assert (everywhere == -1).sum() == packings[0].padding.total_rows_over_cp_ranks - sum(lengths)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype(dtype):
    packing = Packing.from_lengths([3, 5], Alignment(scaling="delayed"))
    x = torch.randint(0, 2, (8, 2, 3)).to(dtype)
    packed = packing.pack_concatenated_tokens(x, fill=1)
    assert packed.dtype == dtype
    assert torch.equal(packing.unpack_gathered_shards(packed), x)
    assert (packed[0, 8:] == 1).all()


def test_gradients_come_back_to_the_tokens_that_were_used():
    packing = Packing.from_lengths([3, 5], Alignment(scaling="delayed"))
    x = torch.randn(8, 2, requires_grad=True)
    weight = torch.randn(8, 2)
    (packing.unpack_gathered_shards(packing.pack_concatenated_tokens(x, roll=1)) * weight).sum().backward()
    later = torch.cat([torch.cat((torch.zeros(1, 2), w[:-1])) for w in weight.split((3, 5))])
    assert torch.equal(x.grad, later)


def test_a_fill_may_differ_from_row_to_row():
    packing = Packing.from_lengths([3, 5], Alignment(scaling="delayed"))
    routes = torch.zeros(8, 1, 2, dtype=torch.int16)
    spread = (torch.arange(16)[:, None, None] + torch.arange(2)) % 8
    packed = packing.pack_concatenated_tokens(routes, fill=spread)
    assert packed.dtype == torch.int16
    assert torch.equal(packed[0, 8:], spread[8:].to(torch.int16))
    assert not packed[0, :8].any()


def test_split_gives_the_sequences():
    packing = Packing.from_lengths([3, 1, 5], Alignment())
    x = torch.arange(18).view(9, 2)
    views = packing.split_concatenated(x)
    assert [len(v) for v in views] == [3, 1, 5]
    assert views[1].data_ptr() == x[3].data_ptr()


def test_labels_of_a_zigzag_pair():
    ranks = packings_of([7], Alignment(cp=2))
    assert [p.pack_concatenated_tokens(torch.arange(1, 8), roll=1).tolist() for p in ranks] == [
        [[2, 3, 0, 0]],
        [[4, 5, 6, 7]],
    ]


@pytest.mark.parametrize(
    ("call", "values"),
    [
        (lambda packing: packing.pack_concatenated_tokens(torch.zeros(9)), r"\[9\].*8 tokens"),
        (lambda packing: packing.unpack_gathered_shards(torch.zeros(1, 6)), r"\[1, 6\].*\[2, 6\]"),
        (lambda packing: packing.repeat_per_packed_row(torch.zeros(3)), "2 sequences"),
        (lambda packing: packing.pack_concatenated_tokens(torch.zeros(8), roll=-1), "-1"),
    ],
    ids=["pack", "unpack", "spread", "roll"],
)
def test_what_does_not_fit_is_refused_by_shape(call, values, messages):
    packing = Packing.from_lengths([3, 5], Alignment(cp=2), rank=1)
    with pytest.raises(JobFailed, match=values) as error:
        call(packing)
    messages(error.value)


@pytest.mark.parametrize(("rank", "named"), [(None, "`rank`"), (2, "rank: 2 ")])
def test_a_rank_must_be_named_and_exist(rank, named, messages):
    with pytest.raises(JobFailed, match=named) as error:
        Packing.from_lengths([4], Alignment(cp=2), rank=rank)
    messages(error.value)
