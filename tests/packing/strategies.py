"""Any lengths, and any parallel layout that they may be padded for."""

import random

from hypothesis import strategies as st

from bundle.fp8 import SCALINGS
from bundle.recipe.alignment import Alignment

SIZES = st.sampled_from((1, 2, 4, 8))
ALIGNMENTS = st.builds(
    Alignment,
    layout=st.sampled_from(("thd", "bshd")),
    tp=SIZES,
    cp=SIZES,
    sequence_parallel=st.booleans(),
    scaling=st.sampled_from((None, *SCALINGS)),
)


def drawn(count, longest, seed):
    """`count` lengths from 1 to `longest`."""
    draw = random.Random(seed)
    return [draw.randint(1, longest) for _ in range(count)]


# Lists of hypothesis are rarely long: many sequences come from the second kind, short ones to keep that fast.
LENGTHS = st.one_of(
    st.lists(st.integers(1, 4096), min_size=1, max_size=512),
    st.builds(drawn, st.integers(1, 512), st.sampled_from((1, 9, 130)), st.integers(0, 999)),
)
