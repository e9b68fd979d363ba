"""Orders: permutations that never change, epochs, and what is held out."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bundle.data.samplers import Shuffle, drawn, held_out


@given(st.integers(1, 3000), st.text(max_size=5))
def test_a_shuffle_is_a_permutation(size, key):
    assert sorted(Shuffle(size, key)(np.arange(size)).tolist()) == list(range(size))


def test_any_part_of_a_huge_shuffle_is_cheap_and_agrees_with_the_rest():
    shuffle = Shuffle(10**15, "k")
    places = np.asarray([0, 7, 10**15 - 1])
    together = shuffle(places)
    assert len(set(together.tolist())) == 3 and (together < 10**15).all()
    assert [int(shuffle(places[i : i + 1])[0]) for i in range(3)] == together.tolist()


def test_the_order_of_a_seed_never_changes():
    """Written down once: a resumed run must find these samples on any machine, numpy and Python."""
    assert Shuffle(10, "training 1234 0")(np.arange(10)).tolist() == [4, 9, 3, 7, 5, 6, 8, 0, 2, 1]
    assert drawn(95, 10, 100, 7).tolist() == [30, 23, 37, 13, 52, 41, 14, 43, 39, 62]


@given(st.integers(1, 40), st.integers(0, 100), st.integers(0, 3))
def test_every_epoch_takes_every_sample_once_in_its_own_order(size, first, seed):
    run = np.concatenate([drawn(start, 1, size, seed) for start in range(first + 3 * size)])
    assert drawn(first, 2 * size, size, seed).tolist() == run[first : first + 2 * size].tolist()
    for epoch in range(3):
        assert sorted(run[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))


def test_epochs_and_seeds_differ():
    first, second = drawn(0, 50, 50, 1), drawn(50, 50, 50, 1)
    assert first.tolist() != second.tolist()
    assert first.tolist() != drawn(0, 50, 50, 2).tolist()


@given(st.integers(0, 500), st.floats(0, 0.99))
def test_held_out_is_the_asked_share_and_at_least_one(size, fraction):
    count = int(held_out(size, fraction, 3).sum())
    assert count == (0 if fraction == 0 else min(size, max(1, round(size * fraction))))
