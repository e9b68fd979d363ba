"""The blocks of a rank against the definition of packed zigzag attention, row by row and key by key."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bundle.backends.cpu.attention import build_layout
from bundle.errors import JobFailed
from tests.backends.cpu.reference import zigzag_rows


@st.composite
def packs(draw):
    cp = draw(st.sampled_from([1, 2, 3, 4]))
    multiple = 2 * cp if cp > 1 else 1
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=6))
    padded = [-(-n // multiple) * multiple + multiple * draw(st.integers(0, 2)) for n in lengths]
    return lengths, padded, cp


@settings(max_examples=150, deadline=None)
@given(packs(), st.booleans())
def test_every_row_sees_exactly_the_keys_that_it_should(pack, causal):
    lengths, padded, cp = pack
    begin = [sum(padded[:i]) for i in range(len(padded))]
    owner = [i for i, size in enumerate(padded) for _ in range(size)]
    shards = []
    for rank in range(cp):
        rows = zigzag_rows(padded, cp, rank)
        shards += rows
        layout = build_layout(tuple(lengths), tuple(padded), rows=len(rows), cp=cp, rank=rank, causal=causal)
        seen = []
        for block in layout.blocks:
            for row in range(block.rows):
                # Causal: a block's last row sees all of the block's keys, the row before one fewer.
                last = block.keys - (block.rows - 1 - row) if causal and block.keys else block.keys
                seen.append([begin[block.sequence] + key for key in range(last)])
        for row, keys in zip(rows, seen, strict=True):
            sequence = owner[row]
            position = row - begin[sequence]
            limit = min(lengths[sequence], position + 1) if causal else lengths[sequence]
            want = range(begin[sequence], begin[sequence] + limit) if position < lengths[sequence] else []
            assert keys == list(want)
        assert layout.keys == tuple(padded)
    if cp > 1:
        assert torch.tensor(shards)[layout.order].tolist() == list(range(sum(padded)))


@pytest.mark.parametrize(
    ("lengths", "padded", "rows", "cp", "message"),
    [
        ((6, 8), (6, 8), 7, 2, r"\[6\] are not multiples of 4"),
        ((5, 3), (5, 3), 9, 1, "at token 8.*9 tokens"),
        ((5, 3), (4, 4), 8, 1, "do not fit"),
        ((5,), (5, 4), 9, 1, "do not fit"),
        ((-1, 5), (-1, 5), 4, 1, "do not fit"),
    ],
)
def test_what_accelerators_refuse_is_refused(lengths, padded, rows, cp, message):
    with pytest.raises(JobFailed, match=message):
        build_layout(lengths, padded, rows=rows, cp=cp, rank=0, causal=True)
