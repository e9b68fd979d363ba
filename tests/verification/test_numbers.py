"""How distances are put together."""

import math
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("megatron")


def test_the_worst_distance_is_not_a_number_wherever_one_is_none():
    from bundle.verification.numbers import find_worst

    assert find_worst([0.5, 2, 0.25]) == 2
    assert all(math.isnan(find_worst(gaps)) for gaps in permutations([0.0, math.nan, math.inf]))


def test_a_measurement_without_a_separate_query_norm_is_not_provable():
    from bundle.verification.check import NotProvable
    from bundle.verification.measurements.attention import measure_mla_query_norm_gradient

    folded = torch.nn.Module()
    folded.register_parameter("layer_norm_weight", torch.nn.Parameter(torch.ones(2)))
    layout = SimpleNamespace(build_chunk=lambda *_: folded)
    bench: Any = SimpleNamespace(measure_gap_to_one_rank=lambda compute, tp: compute(layout))
    with pytest.raises(NotProvable, match="Transformer Engine"):
        measure_mla_query_norm_gradient(bench)
