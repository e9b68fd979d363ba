"""Which samples come when: random orders that are the same on every machine and in every release of numpy."""

import functools
import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
# Whoever goes on after a checkpoint must find this again: orders of another name are other orders.
ORDER = "numpy.random.RandomState"
# What weights are counted in at most, so that the pattern of a blend is short.
PARTS = 10**5


def permutation(size: int, key: str) -> Ints:
    """range(size) in the random order that is named by `key`; read only: [size].

    numpy promises that the streams of this generator never change (NEP 19).
    """
    words = np.frombuffer(hashlib.sha256(key.encode()).digest(), np.dtype("<u4"))
    order: Ints = np.random.RandomState(words).permutation(size).astype(np.int64)
    order.flags.writeable = False
    return order


class Epochs:
    """An endless run through `size` samples, each epoch shuffled anew; `key` names the run."""

    def __init__(self, size: int, key: str) -> None:
        self._size = size
        # Every step asks for its epoch's order; an epoch may end within a step.
        self._order = functools.lru_cache(maxsize=2)(lambda epoch: permutation(size, f"{key} {epoch}"))

    def at(self, places: Ints) -> Ints:
        """The samples at these places of the run."""
        epochs, within = places // self._size, places % self._size
        samples = np.empty(len(places), np.int64)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            samples[here] = self._order(epoch)[within[here]]
        return samples


class Blend:
    """An endless run through data sets: next comes the one whose share lags most, of equals the first.

    That is megatron-core's rule (`build_blending_indices`): before place n, a data set of share w that was
    taken c times lags by w * max(n, 1) - c. Here in whole numbers: after as many places as the shares have
    parts nobody lags, and all repeats, so that any place is found without those before it.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        """`sizes` are the samples of each data set, which are numbered one after the other."""
        exact = [Fraction(str(weight)) for weight in weights]
        exact = [weight / sum(exact) for weight in exact]
        parts = min(PARTS, math.lcm(*(share.denominator for share in exact)))
        # Of `period` places, how many are each data set's.
        self.shares: Ints = np.asarray([max(1, round(share * parts)) for share in exact])
        self.period = int(self.shares.sum())
        self.sizes, self._before = tuple(sizes), np.cumsum(sizes) - sizes
        run = f"training {seed}"
        runs = [run] if len(sizes) == 1 else [f"{run}, {number}" for number in range(len(sizes))]
        self._epochs = [Epochs(size, run) for size, run in zip(sizes, runs, strict=True)]
        self._owners = _lagging(self.shares, 2 * self.period)  # only the first period begins with max(n, 1)
        self._nth = np.empty(2 * self.period, np.int64)
        for owner in range(len(sizes)):
            here = self._owners == owner
            self._nth[here] = np.arange(here.sum())

    def drawn(self, first: int, count: int) -> Ints:
        """The numbers of the `count` samples from place `first` on."""
        places = np.arange(first, first + count, dtype=np.int64)
        at = np.where(places < self.period, places, self.period + places % self.period)
        owners = self._owners[at]
        nth = self._nth[at] + np.maximum(0, places // self.period - 1) * self.shares[owners]
        numbers = np.empty(count, np.int64)
        for owner in np.unique(owners).tolist():
            here = owners == owner
            numbers[here] = self._before[owner] + self._epochs[owner].at(nth[here])
        return numbers

    def taken(self, places: int) -> Ints:
        """How many samples of each data set are at the first `places`: [data sets]."""
        whole, rest = divmod(places, self.period)
        begin = self.period if whole else 0
        last = np.bincount(self._owners[begin : begin + rest], minlength=len(self.shares))
        return whole * self.shares + last


def _lagging(shares: Ints, places: int) -> Ints:
    """The data set of each place, from the first on."""
    owners, lag = np.empty(places, np.int64), shares.copy()
    for place in range(places):
        owner = int(lag.argmax())
        owners[place] = owner
        lag += shares if place else 0
        lag[owner] -= shares.sum()
    return owners


def held_out(size: int, fraction: float, seed: int) -> NDArray[np.bool_]:
    """Which of `size` pieces are kept for evaluation: [size]; at least one where `fraction` is not zero."""
    chosen = np.zeros(size, np.bool_)
    if fraction > 0:
        count = min(size, max(1, round(size * fraction)))
        chosen[permutation(size, f"held out {seed}")[:count]] = True
    return chosen
