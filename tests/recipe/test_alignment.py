"""Padding against a search for the least one, with the conditions written down rank by rank."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bundle.errors import JobFailed
from bundle.fp8 import SCALINGS
from bundle.recipe.alignment import Alignment, Padding
from tests.packing.strategies import ALIGNMENTS, LENGTHS


def divides(alignment, rows):
    """Whether a sequence of so many rows can be shared by the context-parallel ranks."""
    return alignment.cp == 1 or rows % (2 * alignment.cp) == 0


def fits_every_rank(alignment, total):
    """Whether each rank gets the same number of rows, as many as its FP8 kernels take."""
    if total % alignment.cp:
        return False
    rows = total // alignment.cp
    if alignment.sequence_parallel:
        if rows % alignment.tp:
            return False
        rows //= alignment.tp
    return alignment.scaling is None or rows % (32 if alignment.scaling == "mxfp8" else 16) == 0


def least(numbers, condition):
    return next(n for n in numbers if condition(n))


def least_padding(alignment, lengths):
    """(padded, tail) found by trying one number after the other."""
    if alignment.layout == "thd":
        padded = [least(range(n, 10**6), lambda rows: divides(alignment, rows)) for n in lengths]
        tail = least(
            range(10**6),
            lambda tail: divides(alignment, tail) and fits_every_rank(alignment, sum(padded) + tail),
        )
        return tuple(padded), tail
    shared = alignment.cp * (alignment.tp if alignment.sequence_parallel else 1)
    s = least(
        range(max(lengths), 10**6),
        lambda s: divides(alignment, s) and s % shared == 0 and fits_every_rank(alignment, s * len(lengths)),
    )
    return (s,) * len(lengths), 0


@settings(deadline=None, max_examples=400)
@given(LENGTHS, ALIGNMENTS)
def test_padding_is_the_least_that_every_rank_accepts(lengths, alignment):
    padding = alignment.pad(lengths)
    assert (padding.padded_lengths, padding.tail_rows) == least_padding(alignment, lengths)
    assert padding.lengths == tuple(lengths)
    assert (
        padding.total_rows_over_cp_ranks
        == sum(padding.padded_lengths_with_tail)
        == sum(padding.padded_lengths) + padding.tail_rows
    )
    assert padding.longest_kernel_sequence_rows == max(*padding.padded_lengths, padding.tail_rows)
    assert padding.real_tokens == sum(lengths)


@pytest.mark.parametrize(
    ("alignment", "sequence", "total"),
    [
        (Alignment(), 1, 1),
        (Alignment(cp=4), 8, 8),
        (Alignment(tp=4), 1, 1),
        (Alignment(tp=4, sequence_parallel=True), 1, 4),
        (Alignment(tp=2, cp=2, sequence_parallel=True), 4, 4),
        (Alignment(tp=8, cp=2, sequence_parallel=True), 4, 16),
        (Alignment(scaling="delayed"), 1, 16),
        (Alignment(tp=4, cp=2, scaling="blockwise"), 4, 32),
        (Alignment(tp=4, cp=2, sequence_parallel=True, scaling="tensorwise"), 4, 128),
        (Alignment(cp=2, scaling="mxfp8"), 4, 64),
        (Alignment("bshd", tp=2, cp=2, sequence_parallel=True), 4, 4),
        (Alignment("bshd", tp=8, cp=2, sequence_parallel=True, scaling="delayed"), 16, 256),
    ],
)
def test_multiples(alignment, sequence, total):
    assert (alignment.sequence_multiple, alignment.total_multiple) == (sequence, total)


def test_a_bshd_batch_shares_the_fp8_rows_between_its_sequences():
    delayed = Alignment("bshd", scaling="delayed")
    assert delayed.pad([5]).padded_lengths == (16,)
    assert delayed.pad([5, 3]).padded_lengths == (8, 8)
    assert delayed.pad([5] * 16).padded_lengths == (5,) * 16


def test_a_forced_length_is_rounded_up_and_holds_what_fits(messages):
    assert Alignment(cp=2).pad([5, 6], length=41) == Padding((5, 6), (8, 8), 28)
    assert Alignment("bshd", cp=2).pad([5, 6], length=41).padded_lengths == (44, 44)
    assert Alignment(cp=2).pad([5, 6], length=13).total_rows_over_cp_ranks == 16
    with pytest.raises(JobFailed, match=r" 16 .* 12\.") as error:
        Alignment(cp=2).pad([5, 6], length=12)
    messages(error.value)
    with pytest.raises(JobFailed, match=r" 9 .* 8\.") as error:
        Alignment("bshd").pad([3, 9], length=8)
    messages(error.value)


def test_dynamic_context_parallelism_is_another_size_for_the_same_job():
    job = Alignment(tp=2, cp=8, sequence_parallel=True, scaling="delayed")
    short = job._replace(cp=2)
    assert (short.sequence_multiple, short.total_multiple) == (4, 64)


@settings(deadline=None)
@given(LENGTHS, ALIGNMENTS, st.integers(0, 4096))
def test_a_longer_forced_length_never_gives_a_shorter_extent(lengths, alignment, extra):
    least = alignment.pad(lengths)
    extent = (
        least.total_rows_over_cp_ranks if alignment.layout == "thd" else least.longest_kernel_sequence_rows
    )
    forced = alignment.pad(lengths, length=extent + extra)
    assert extent + extra <= (
        forced.total_rows_over_cp_ranks if alignment.layout == "thd" else forced.longest_kernel_sequence_rows
    )
    assert fits_every_rank(alignment, forced.total_rows_over_cp_ranks)


@pytest.mark.parametrize("wrong", [0, -3, 2.5, True, "7", None])
def test_lengths_are_host_ints_from_one(wrong):
    with pytest.raises(JobFailed) as error:
        Alignment().pad([4, wrong, 8, wrong])
    assert error.value.violations == (f"sequence 1: {wrong!r}", f"sequence 3: {wrong!r}")


def test_an_empty_micro_batch_is_refused():
    with pytest.raises(JobFailed, match="no sequences"):
        Alignment().pad([])


def test_every_scaling_says_where_its_rows_come_from():
    assert {name: entry.row_multiple for name, entry in SCALINGS.items()} == {
        "delayed": 16,
        "tensorwise": 16,
        "blockwise": 16,
        "mxfp8": 32,
    }
    assert all(entry.source for entry in SCALINGS.values())
