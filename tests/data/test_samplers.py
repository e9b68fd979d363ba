"""Orders: permutations that never change, epochs, and what is held out."""

import hashlib
import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle.data.samples import Epochs, choose_held_out, draw_permutation


def shuffled(size: int, key: str) -> list[int]:
    """numpy's legacy shuffle by Python's own Mersenne Twister, which is seeded by the same words."""
    twister = random.Random(int.from_bytes(hashlib.sha256(key.encode()).digest(), "little"))
    order = list(range(size))
    for last in reversed(range(1, size)):
        bits = (1 << last.bit_length()) - 1
        while (place := twister.getrandbits(32) & bits) > last:
            pass
        order[last], order[place] = order[place], order[last]
    return order


def drawn(first: int, count: int, size: int, seed: int) -> np.ndarray:
    return Epochs(size, f"training {seed}").select_samples(np.arange(first, first + count))


@given(st.integers(1, 3000), st.text(max_size=5))
def test_an_order_is_that_of_the_documented_generator(size, key):
    assert draw_permutation(size, key).tolist() == shuffled(size, key)


def test_the_order_of_a_seed_never_changes():
    """Written down once: a resumed run must find these samples on any machine, numpy and Python."""
    assert draw_permutation(10, "training 1234 0").tolist() == [0, 6, 3, 7, 9, 8, 4, 1, 2, 5]
    assert drawn(95, 10, 100, 7).tolist() == [47, 59, 22, 83, 69, 31, 17, 25, 24, 80]


def test_nobody_changes_an_order_that_others_have():
    with pytest.raises(ValueError, match="read-only"):
        draw_permutation(5, "k").sort()


@given(st.integers(1, 40), st.integers(0, 100), st.integers(0, 3))
def test_every_epoch_takes_every_sample_once_in_its_own_order(size, first, seed):
    run = np.concatenate([drawn(start, 1, size, seed) for start in range(first + 3 * size)])
    assert drawn(first, 2 * size, size, seed).tolist() == run[first : first + 2 * size].tolist()
    for epoch in range(3):
        assert run[epoch * size : (epoch + 1) * size].tolist() == shuffled(size, f"training {seed} {epoch}")


def test_a_step_of_millions_of_samples_does_not_shuffle_them_again():
    run = Epochs(3_000_000, "training")
    run.select_samples(np.arange(64))
    before = time.process_time()
    for step in range(100):
        run.select_samples(np.arange(step * 64, step * 64 + 64))
    assert time.process_time() - before < 1


def test_epochs_and_seeds_differ():
    first, second = drawn(0, 50, 50, 1), drawn(50, 50, 50, 1)
    assert first.tolist() != second.tolist()
    assert first.tolist() != drawn(0, 50, 50, 2).tolist()


@given(st.integers(0, 500), st.floats(0, 0.99))
def test_held_out_is_the_asked_share_and_at_least_one(size, fraction):
    count = 0 if fraction == 0 else min(size, max(1, round(size * fraction)))
    assert np.flatnonzero(choose_held_out(size, fraction, 3)).tolist() == sorted(
        shuffled(size, "held out 3")[:count]
    )
