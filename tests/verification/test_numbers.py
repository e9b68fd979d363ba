"""How distances are put together."""

import math
from itertools import permutations

import pytest

pytestmark = pytest.mark.usefixtures("megatron")


def test_the_worst_distance_is_not_a_number_wherever_one_is_none():
    from bundle.verification.numbers import find_worst

    assert find_worst([0.5, 2, 0.25]) == 2
    assert all(math.isnan(find_worst(gaps)) for gaps in permutations([0.0, math.nan, math.inf]))
