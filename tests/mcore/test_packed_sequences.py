"""Boundaries of packs as host integers, and the next token of every row, without reading them back."""

import threading
from functools import partial
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

from benchmarks.sequences import operations
from bundle.mcore import packed_sequences
from bundle.mcore.packed_sequences import (
    build_packed_seq_params,
    compute_positions_and_starts,
    roll_packed,
    to_host,
)
from bundle.packing.packing import Packing
from bundle.recipe.alignment import Alignment


@pytest.mark.parametrize("cp", [1, 2])
def test_our_own_cost_nothing(monkeypatch, cp):
    packing = Packing.from_lengths([5, 3, 9], Alignment(cp=cp, scaling="blockwise"), rank=0)
    parameters = build_packed_seq_params(packing)
    want = parameters.cu_seqlens_q_padded.tolist()
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: pytest.fail("read back from the device"))
    assert to_host(parameters.cu_seqlens_q_padded) == to_host(parameters.cu_seqlens_kv_padded) == tuple(want)


def test_a_strangers_are_read_once(monkeypatch):
    reads, real = [], torch.Tensor.tolist

    def counted(tensor):
        reads.append(tensor)
        return real(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    ends, others = torch.tensor([0, 4, 9]), torch.tensor([0, 4, 10])
    assert [to_host(ends) for _ in range(3)] == [(0, 4, 9)] * 3
    assert to_host(others) == (0, 4, 10)
    assert len(reads) == 2


class Ranks:
    """Context-parallel ranks as threads; each sees what all of them hand over."""

    def __init__(self, ranks):
        self.ranks, self.barrier, self.given = ranks, threading.Barrier(ranks), {}

    def run(self, function):
        """What `function(group, rank)` returned on each rank."""
        results = {}
        threads = [
            threading.Thread(target=lambda r=r: results.update({r: function(Rank(self, r), r)}))
            for r in range(self.ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return [results[rank] for rank in range(self.ranks)]


class Rank:
    def __init__(self, all, rank):
        self.all, self.size, self.rank = all, lambda: all.ranks, lambda: rank

    def gather(self, whole, mine, group):
        self.all.given[self.rank()] = mine.clone()
        self.all.barrier.wait(30)
        whole.copy_(torch.cat([self.all.given[rank] for rank in range(self.size())]))
        self.all.barrier.wait(30)


def zigzag(x, lengths, ranks, rank):
    """What one rank holds of a pack [..., t]: chunks r and 2 cp - 1 - r of every sequence."""
    shards = []
    for sequence in x.split(lengths, -1):
        chunks = sequence.split(max(1, sequence.shape[-1] // (2 * ranks)), -1) if ranks > 1 else [sequence]
        shards += [chunks[rank], chunks[2 * ranks - 1 - rank]] if ranks > 1 and len(chunks) > 1 else []
        shards += chunks if ranks == 1 else []
    return torch.cat(shards, -1)


@given(
    halves=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    ranks=st.sampled_from((1, 2, 3, 4)),
    rows=st.integers(1, 3),
    seed=st.integers(0, 999),
)
def test_every_row_takes_the_next_token_of_its_own_sequence(halves, ranks, rows, seed):
    lengths = [half * 2 * ranks for half in (*halves, 1)]
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(1, 1000, (rows, sum(lengths)), generator=draw)
    after = torch.cat([torch.cat([part[:, 1:], part[:, :1] * 0], -1) for part in x.split(lengths, -1)], -1)
    boundaries = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.distributed,
            "all_gather_into_tensor",
            lambda out, mine, group: group.gather(out, mine, group),
        )
        seen = Ranks(ranks).run(
            lambda group, rank: roll_packed(zigzag(x, lengths, ranks, rank), boundaries.clone(), group)
        )
    for rank, own in enumerate(seen):
        assert own.tolist() == zigzag(after, lengths, ranks, rank).tolist()


def test_twice_rolled_is_two_tokens_later_and_boundaries_changed_in_place_are_seen():
    x, boundaries = torch.arange(1, 9)[None], torch.tensor([0, 3, 8], dtype=torch.int32)
    once = roll_packed(x, boundaries)
    assert once.tolist() == [[2, 3, 0, 5, 6, 7, 8, 0]]
    assert roll_packed(once, boundaries).tolist() == [[3, 0, 0, 6, 7, 8, 0, 0]]
    boundaries[1] = 5
    assert roll_packed(x, boundaries).tolist() == [[2, 3, 4, 5, 0, 7, 8, 0]]


def test_boundaries_written_to_in_every_step_keep_what_was_computed_last_alone():
    boundaries = torch.tensor([0, 3, 8], dtype=torch.int32)
    before = len(packed_sequences._RESULTS_BY_BOUNDARIES)
    for middle in range(1, 8):
        boundaries[1] = middle
        compute_positions_and_starts(boundaries, 8), roll_packed(torch.ones(1, 8), boundaries)
    assert len(packed_sequences._RESULTS_BY_BOUNDARIES) == before + 1
    assert len(packed_sequences._RESULTS_BY_BOUNDARIES[boundaries][1]) == 2


def test_boundaries_made_in_inference_mode_are_read_at_each_call():
    with torch.inference_mode():
        boundaries = torch.tensor([0, 3, 8], dtype=torch.int32)
        assert compute_positions_and_starts(boundaries, 8)[0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
        boundaries[1] = 6
        assert compute_positions_and_starts(boundaries, 8)[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]


def test_rolling_takes_as_many_operations_for_any_number_of_sequences_and_reads_none_back():
    def roll(count, device):
        lengths = [2 + i % 7 for i in range(count)]
        boundaries = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        return roll_packed(torch.ones(1, sum(lengths), device=device), boundaries)

    counts = [operations(partial(roll, count, "cpu")) for count in (2, 64, 500)]
    assert counts[0] == counts[1] == counts[2] < 40
    assert roll(64, "meta").device.type == "meta"  # any look at a value raises there


@given(halves=st.lists(st.integers(0, 9), min_size=1, max_size=40), ranks=st.sampled_from((1, 2, 3, 4)))
def test_every_row_knows_its_position_and_where_its_sequence_begins(halves, ranks):
    lengths = [half * 2 * ranks for half in (*halves, 1)]
    begins = [0, *accumulate(lengths)]
    own = torch.cat([torch.arange(length) for length in lengths])
    begin = torch.cat([torch.full((n,), b) for n, b in zip(lengths, begins, strict=False)])
    for rank in range(ranks):
        group = SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)
        seen = compute_positions_and_starts(torch.tensor(begins, dtype=torch.int32), len(own) // ranks, group)
        for mine, whole in zip(seen, (own, begin), strict=True):
            assert mine.tolist() == zigzag(whole, lengths, ranks, rank).tolist()


@pytest.mark.parametrize(
    ("lengths", "scaling", "length"),
    [([5, 3, 9], None, None), ([5, 3, 9], None, 32), ([5, 3, 9], "blockwise", None), ([4, 8, 9], None, None)],
)
def test_a_pack_says_whether_padding_lies_between_its_sequences(lengths, scaling, length):
    for cp in (1, 2):
        made = build_packed_seq_params(
            Packing.from_lengths(lengths, Alignment(cp=cp, scaling=scaling), rank=0, length=length)
        )
        inner = [ends[:-1].tolist() for ends in (made.cu_seqlens_q, made.cu_seqlens_q_padded)]
        assert made.pad_between_seqs == (inner[0] != inner[1])
