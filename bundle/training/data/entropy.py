"""How predictable a text is from one byte of context: a model below it has learned more than pairs."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK = 2**22


def bigram_entropy(ids: NDArray[Any], vocabulary: int) -> float:
    """H(next | previous) of the text's own pair counts, in nats per token; for small vocabularies."""
    counts = np.zeros(vocabulary * vocabulary, np.int64)
    for start in range(0, max(0, len(ids) - 1), CHUNK):
        part = ids[start : start + CHUNK + 1].astype(np.int64)
        counts += np.bincount(part[:-1] * vocabulary + part[1:], minlength=len(counts))
    pairs = counts.reshape(vocabulary, vocabulary)
    return _entropy(pairs) - _entropy(pairs.sum(1))


def _entropy(counts: NDArray[np.int64]) -> float:
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log(shares)).sum())
