"""Which samples come when: random orders that are the same on every machine and in every release of numpy."""

import functools
import hashlib

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
# Whoever goes on after a checkpoint must find this again: orders of another name are other orders.
ORDER = "numpy.random.RandomState"


@functools.lru_cache(maxsize=4)  # every step asks for its epoch's; an epoch may end within a step
def permutation(size: int, key: str) -> Ints:
    """range(size) in the random order that is named by `key`; read only: [size].

    numpy promises that the streams of this generator never change (NEP 19).
    """
    words = np.frombuffer(hashlib.sha256(key.encode()).digest(), np.dtype("<u4"))
    order: Ints = np.random.RandomState(words).permutation(size).astype(np.int64)
    order.flags.writeable = False
    return order


def drawn(first: int, count: int, size: int, seed: int) -> Ints:
    """The `count` samples from number `first` of an endless run on, each epoch shuffled anew."""
    places = np.arange(first, first + count, dtype=np.int64)
    epochs, within = places // size, places % size
    order = np.empty(count, np.int64)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        order[here] = permutation(size, f"training {seed} {epoch}")[within[here]]
    return order


def held_out(size: int, fraction: float, seed: int) -> NDArray[np.bool_]:
    """Which of `size` pieces are kept for evaluation: [size]; at least one where `fraction` is not zero."""
    chosen = np.zeros(size, np.bool_)
    if fraction > 0:
        count = min(size, max(1, round(size * fraction)))
        chosen[permutation(size, f"held out {seed}")[:count]] = True
    return chosen
