"""FP8 with scales by blocks: within the bound of the block, whatever the matrix; against plain float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bundle.models.publishing import dequantize_blocks, quantize_blocks


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 17), st.integers(1, 17), st.integers(0, 2**32))
def test_every_value_is_within_the_bound_of_its_block(rows, columns, down, across, seed):
    generator = torch.Generator().manual_seed(seed)
    # Over many powers of two, so that blocks have normal and subnormal numbers.
    matrix = torch.randn(rows, columns, generator=generator) * 2.0 ** torch.randint(
        -14, 4, (rows, columns), generator=generator
    )
    stored, scales = quantize_blocks(matrix, (down, across))
    assert stored.shape == matrix.shape
    assert scales.shape == (math.ceil(rows / down), math.ceil(columns / across))
    for i in range(rows):
        for j in range(columns):
            scale = scales[i // down, j // across].double()
            back, value = stored[i, j].double() * scale, matrix[i, j].double()
            assert abs(back - value) <= max(abs(value) / 16, scale / 1024) * (1 + 1e-6)


def test_the_largest_value_of_a_block_is_the_largest_of_fp8():
    matrix = torch.ones(4, 6)
    matrix[0, 0], matrix[3, 5] = -7.0, 14.0
    stored, scales = quantize_blocks(matrix, (2, 3))
    assert stored[0, 0].float() == -448
    assert stored[3, 5].float() == 448
    assert torch.allclose(scales, torch.tensor([[7.0, 1.0], [1.0, 14.0]]) / 448)


def test_a_block_of_zeros_has_a_scale_that_can_be_multiplied_by():
    stored, scales = quantize_blocks(torch.zeros(3, 3), (2, 2))
    assert stored.float().abs().max() == 0
    assert scales.isfinite().all()
    assert (scales > 0).all()


@pytest.mark.parametrize("start", [(0, 0), (3, 0), (0, 5), (7, 9)])
def test_a_part_is_multiplied_by_the_scales_of_its_own_blocks(start):
    """Ragged blocks: 130 x 77 in blocks of 24 x 20, cut anywhere."""
    stored = torch.randn(130, 77).to(torch.float8_e4m3fn)
    scales = torch.rand(6, 4) + 0.5
    whole = stored.float() * torch.kron(scales, torch.ones(24, 20))[:130, :77]
    row, column = start
    part = dequantize_blocks(stored[row:, column:], scales, (24, 20), start)
    assert torch.equal(part, whole[row:, column:])
