"""Pieces of the token store: cutting documents, and fitting pieces into packs."""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bundle.sequences.packing.runs import ramp

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Spans:
    """Pieces of the token store, [pieces] each."""

    starts: Ints
    lengths: Ints

    def __len__(self) -> int:
        return len(self.starts)

    def where(self, chosen: NDArray[np.bool_] | Ints) -> "Spans":
        """Only the chosen pieces, in the order of their numbers or as numbered."""
        return Spans(self.starts[chosen], self.lengths[chosen])

    def cut(self, longest: int) -> "Spans":
        """The same tokens in pieces of at most `longest`; only a document's last piece is shorter."""
        pieces = -(-self.lengths // longest)
        owner = np.repeat(np.arange(len(self)), pieces)
        offset = ramp(np.zeros(len(self), np.int64), pieces) * longest
        return Spans(self.starts[owner] + offset, np.minimum(self.lengths[owner] - offset, longest))


def best_fit(lengths: Ints, room: int) -> list[Ints]:
    """The pieces of each pack, by number, at most `room` together: longest first, each where it fits best.

    The work per piece is one bisection among the distinct sizes of free room. Lengths are 1 .. `room`.
    """
    packs: list[list[int]] = []
    free: dict[int, list[int]] = {}  # free room -> packs that have it
    sizes: list[int] = []  # the keys of `free`, sorted
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        at = bisect_left(sizes, length)
        if at == len(sizes):
            pack, left = len(packs), room
            packs.append([])
        else:
            left = sizes[at]
            pack = free[left].pop()
            if not free[left]:
                del free[left], sizes[at]
        packs[pack].append(piece)
        left -= length
        if left:
            if left not in free:
                insort(sizes, left)
            free.setdefault(left, []).append(pack)
    return [np.asarray(pack, np.int64) for pack in packs]
