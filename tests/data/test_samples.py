"""Cutting documents and filling packs."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bundle.data.samples import Spans, pack_best_fit
from bundle.packing.packing import concatenate_ranges

LENGTHS = st.lists(st.integers(0, 60), max_size=20).map(lambda values: np.asarray(values, np.int64))


@given(LENGTHS, st.integers(1, 25))
def test_cut_pieces_hold_the_same_tokens_in_order(lengths, longest):
    documents = Spans(np.cumsum(lengths) - lengths + 100, lengths)
    pieces = documents.split_by_max_length(longest)
    assert (
        concatenate_ranges(pieces.starts, pieces.lengths).tolist()
        == concatenate_ranges(documents.starts, lengths).tolist()
    )
    assert all(1 <= length <= longest for length in pieces.lengths.tolist())


@given(st.lists(st.integers(1, 64), min_size=1, max_size=200), st.integers(64, 200))
def test_packs_take_every_piece_once_and_never_too_much(lengths, room):
    packs = pack_best_fit(np.asarray(lengths), room)
    assert sorted(piece for pack in packs for piece in pack.tolist()) == list(range(len(lengths)))
    fills = [sum(lengths[piece] for piece in pack.tolist()) for pack in packs]
    assert max(fills) <= room
    # Best fit opens a pack only when no other takes the piece: any two packs together overflow one.
    assert all(a + b > room for i, a in enumerate(fills) for b in fills[i + 1 :])


def test_many_short_pieces_fill_nearly_all_room_quickly():
    lengths = np.random.default_rng(0).integers(10, 400, 50_000)
    packs = pack_best_fit(lengths, 1024)
    assert lengths.sum() / (len(packs) * 1024) > 0.99
