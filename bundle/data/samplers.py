"""Random orders that need no memory and are the same on every machine and in every release of numpy."""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
ROUNDS = 6


@dataclass(frozen=True)
class Shuffle:
    """A permutation of range(size), named by `key`: a Feistel network, walked until it lands in range."""

    size: int
    key: str

    def __call__(self, places: Ints) -> Ints:
        """What stands at `places` (each in range(size)) of the shuffled range."""
        half = max(1, ((self.size - 1).bit_length() + 1) // 2)
        seed = hashlib.sha256(self.key.encode()).digest()
        rounds = np.frombuffer(seed * 2, np.dtype("<u8"))[:ROUNDS]
        values = self._walk(places.astype(np.uint64), rounds, half)
        while (outside := values >= self.size).any():
            values[outside] = self._walk(values[outside], rounds, half)
        return values.astype(np.int64)

    @staticmethod
    def _walk(values: NDArray[np.uint64], rounds: NDArray[np.uint64], half: int) -> NDArray[np.uint64]:
        """One pass through the network: a permutation of range(4 ** half)."""
        bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
        left, right = values >> bits, values & mask
        for key in rounds:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return (left << bits) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: every input bit changes about half of the output bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def drawn(first: int, count: int, size: int, seed: int) -> Ints:
    """The `count` samples from number `first` of an endless run on, each epoch shuffled anew."""
    places = np.arange(first, first + count, dtype=np.int64)
    epochs, within = places // size, places % size
    order = np.empty(count, np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        order[here] = Shuffle(size, f"training {seed} {epoch}")(within[here])
    return order


def held_out(size: int, fraction: float, seed: int) -> NDArray[np.bool_]:
    """Which of `size` pieces are kept for evaluation: [size]; at least one where `fraction` is not zero."""
    chosen = np.zeros(size, np.bool_)
    if fraction > 0:
        count = min(size, max(1, round(size * fraction)))
        chosen[Shuffle(size, f"held out {seed}")(np.arange(count))] = True
    return chosen
