"""Scales, blocks and rounding against the float64 reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bundle.backends.cpu.scaling import (
    E4M3,
    E5M2,
    compute_e8m0_scale,
    compute_exact_scale,
    compute_power_of_two_scale,
    fake_quantize_to_fp8,
    find_amax,
    round_blocks_to_fp8,
)
from tests.backends.cpu.fp8 import reference

DTYPES = {"e4m3": E4M3, "e5m2": E5M2}
RULES = {"exact": compute_exact_scale, "power of two": compute_power_of_two_scale, "e8m0": compute_e8m0_scale}
SIZES = st.floats(2.0**-60, 2.0**60, width=32)


@pytest.mark.parametrize("form", DTYPES)
def test_every_number_of_a_format_is_its_own_rounding(form):
    table = torch.tensor(reference.numbers(form)).float()
    assert table.max() == torch.finfo(DTYPES[form]).max
    assert torch.equal(fake_quantize_to_fp8(table, torch.ones(()), DTYPES[form]), table)


@pytest.mark.parametrize("form", DTYPES)
def test_rounding_is_to_nearest_ties_to_even(form):
    table = reference.numbers(form)
    halves = (table[1:] + table[:-1]) / 2
    below, above = halves * (1 - 2**-20), halves * (1 + 2**-20)
    x = np.concatenate([halves, below, above, -halves])
    got = fake_quantize_to_fp8(torch.tensor(x).float(), torch.ones(()), DTYPES[form])
    assert np.array_equal(got.numpy(), reference.nearest(x.astype(np.float32).astype(float), form))


@pytest.mark.parametrize("form", DTYPES)
def test_what_is_too_large_saturates_and_nan_stays(form):
    top = torch.finfo(DTYPES[form]).max
    x = torch.tensor([top * 1.01, -3e38, torch.inf, torch.nan])
    got = fake_quantize_to_fp8(x, torch.ones(()), DTYPES[form])
    assert got[:3].tolist() == [top, -top, top] and got[3].isnan()


@given(amax=SIZES, form=st.sampled_from(sorted(DTYPES)), rule=st.sampled_from(sorted(RULES)))
def test_scales_are_the_formulas(amax, form, rule):
    scale = RULES[rule](torch.tensor(amax), DTYPES[form]).item()
    wanted = reference.scale_of(amax, form, rule)
    assert scale == pytest.approx(wanted, rel=2**-23 if rule == "exact" else 0)
    assert amax * scale <= reference.FORMATS[form][2] * (1 + 2**-23)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", DTYPES)
def test_a_scale_that_cannot_be_had_is_one_and_a_tiny_value_has_a_finite_one(rule, form):
    amax = torch.tensor([0.0, torch.inf, torch.nan, 1e-44])
    scale = RULES[rule](amax, DTYPES[form])
    assert scale[:3].tolist() == [1, 1, 1] and scale[3].isfinite()
    assert find_amax(torch.zeros(0, 16)) == 0


@settings(max_examples=30)
@given(
    rows=st.integers(0, 140),
    columns=st.integers(1, 140),
    block=st.sampled_from([(1, 128), (128, 1), (128, 128), (1, 32), (32, 1)]),
    form=st.sampled_from(sorted(DTYPES)),
    rule=st.sampled_from(["power of two", "e8m0"]),
    seed=st.integers(0, 2**31),
)
def test_blocks_are_cut_where_the_reference_cuts_them(rows, columns, block, form, rule, seed):
    """Powers of two scale exactly, so every value is the reference's, last partial blocks included."""
    generator = np.random.default_rng(seed)
    # Sizes differ from row to row and column to column: a block in the wrong place gets another scale.
    sizes = np.exp2(generator.integers(-20, 20, (rows, 1)) + generator.integers(-20, 20, (1, columns)))
    x = (generator.standard_normal((rows, columns)) * sizes).astype(np.float32)
    got = round_blocks_to_fp8(torch.from_numpy(x), block, RULES[rule], DTYPES[form])
    assert np.array_equal(got.numpy(), reference.blocks(x.astype(float), block, form, rule))
    again = round_blocks_to_fp8(got, block, RULES[rule], DTYPES[form])
    if rule == "power of two":  # E8M0 may find a smaller exponent once the largest value is rounded down
        assert torch.equal(again, got)


@given(seed=st.integers(0, 2**31), form=st.sampled_from(sorted(DTYPES)), size=SIZES)
def test_one_scale_for_a_tensor(seed, form, size):
    x = (np.random.default_rng(seed).standard_normal((33, 65)) * size).astype(np.float32)
    t = torch.from_numpy(x)
    got = fake_quantize_to_fp8(t, compute_exact_scale(find_amax(t), DTYPES[form]), DTYPES[form])
    wanted = reference.blocks(x.astype(float), x.shape, form, "exact")
    # A product with a float32 scale may fall on the other side of a tie.
    wrong = ~np.isclose(got.numpy(), wanted, rtol=2**-22, atol=0)
    assert wrong.mean() < 0.005
    ulp = 2.0 ** -reference.FORMATS[form][1]
    assert np.allclose(got.numpy()[wrong], wanted[wrong], rtol=ulp * 1.01)
    again = fake_quantize_to_fp8(got, compute_exact_scale(find_amax(got), DTYPES[form]), DTYPES[form])
    assert torch.allclose(again, got, rtol=2**-22, atol=0)
