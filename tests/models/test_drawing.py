"""Adapters begin as PEFT begins them."""

import math

import torch

from bundle.models.adapters import initialize_matrices
from bundle.models.naming import GloballyNamedTensor


def test_a_is_kaiming_uniform_and_b_zero():
    """A as `torch.nn.init.kaiming_uniform_(a=sqrt(5))` fills it: the same bounds, mean and spread."""
    rank, columns = 64, 400
    a, b = torch.full((rank, columns), math.nan), torch.full((columns, rank), math.nan)
    initialize_matrices(
        [GloballyNamedTensor("x.lora_A.weight", a, None), GloballyNamedTensor("x.lora_B.weight", b, None)],
        seed=3,
    )
    wanted = torch.nn.init.kaiming_uniform_(torch.empty(rank, columns), a=math.sqrt(5))
    bound = 1 / math.sqrt(columns)
    for values in (a, wanted):
        assert 0.99 * bound < values.max() <= bound and -bound <= values.min() < -0.99 * bound
        assert values.mean().abs() < bound / 50
    torch.testing.assert_close(a.std(), wanted.std(), rtol=0.02, atol=0)
    assert not b.any()
