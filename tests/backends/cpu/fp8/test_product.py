"""The products of a linear layer against the float64 reference, every scaling and format."""

from typing import Literal

import numpy as np
import pytest
import torch

from bundle.backends.cpu.layers import multiply_in_fp8
from bundle.backends.cpu.scaling import ForwardPassPurpose, build_quantisers
from bundle.recipe.recipe import FP8
from tests.backends.cpu.fp8 import reference

SCALINGS: tuple[Literal["tensorwise", "blockwise", "mxfp8"], ...] = ("tensorwise", "blockwise", "mxfp8")


def inputs(*shapes, dtype=torch.float32):
    """Fresh random matrices with a few outliers, as activations have them."""
    found = []
    for shape in shapes:
        x = torch.randn(*shape)
        found.append((x * torch.where(torch.rand(*shape) > 0.995, 30.0, 1.0)).to(dtype).requires_grad_())
    return found


def run(x, weight, gradient, fp8, bias=None):
    """Output and gradients of the input and the weight."""
    y = multiply_in_fp8(x, weight, bias, build_quantisers(fp8, None), ForwardPassPurpose.TRAINED)
    return (y, *torch.autograd.grad(y, (x, weight), gradient))


def gap(got: torch.Tensor, wanted: np.ndarray) -> float:
    """The relative error in the Frobenius norm."""
    return float(np.linalg.norm(got.detach().double().numpy() - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("format", ["e4m3", "hybrid"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_all_three_products_are_the_references(scaling, format):
    x, w, g = inputs((144, 160), (136, 160), (144, 136))
    got = run(x, w, g.detach(), FP8(scaling=scaling, format=format))
    a, b, c = (value.detach().double().numpy() for value in (x, w, g))
    wanted = reference.products(a, b, c, scaling=scaling, format=format)
    full = (a @ b.T, c @ b, c.T @ a)
    for value, ours, exact in zip(got, wanted, full, strict=True):
        # float32 sums; a tensor's float32 scale may take a few ties to the other side, each an ulp of FP8.
        assert gap(value, ours) < (3e-3 if scaling == "tensorwise" else 1e-6)
        assert 0.01 < gap(value, exact) < 0.15  # an H200, without outliers: 0.038, and 0.059 with e5m2


def test_hybrid_is_coarser_backward_and_only_there():
    x, w, g = (torch.randn(256, 256, requires_grad=True) for _ in range(3))
    fine, hybrid = (run(x, w, g.detach(), FP8(scaling="tensorwise", format=f)) for f in ("e4m3", "hybrid"))
    assert torch.equal(fine[0], hybrid[0])
    full = (g.t() @ x).detach().double().numpy()
    assert 1.3 < gap(hybrid[2], full) / gap(fine[2], full) < 1.9  # H200: 0.0591 / 0.0375


def test_gradients_come_from_the_rounded_operands():
    """With operands that FP8 holds exactly, output and gradients are those of the plain product."""
    shapes = ((32, 64), (48, 64), (32, 48))
    x, w, g = (torch.exp2(torch.randint(0, 4, s)) * torch.randn(s).sign() for s in shapes)
    x.requires_grad_(), w.requires_grad_()
    for scaling in SCALINGS:
        got = run(x, w, g, FP8(scaling=scaling, format="e4m3"))
        wanted = (x @ w.t(), g @ w, g.t() @ x)
        for value, exact in zip(got, wanted, strict=True):
            assert torch.allclose(value, exact, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("scaling", ("delayed", *SCALINGS))
def test_frozen_weights_biases_and_empty_batches(scaling):
    x, w, g = inputs((2, 16, 64), (32, 64), (2, 16, 32), dtype=torch.bfloat16)
    bias = torch.randn(32).bfloat16().requires_grad_()
    fp8 = FP8(scaling=scaling, format="hybrid")
    y = multiply_in_fp8(x, w.detach(), bias, build_quantisers(fp8, None), ForwardPassPurpose.TRAINED)
    assert y.shape == (2, 16, 32) and y.dtype is torch.bfloat16
    d_x, d_bias = torch.autograd.grad(y, (x, bias), g.detach())
    assert d_x.dtype is torch.bfloat16 and torch.equal(d_bias, g.reshape(-1, 32).sum(0))
    none = torch.zeros(0, 64, requires_grad=True)
    y, _, d_w = run(none, w.detach().float().requires_grad_(), torch.zeros(0, 32), fp8)
    assert y.shape == (0, 32) and torch.equal(d_w, torch.zeros(32, 64))


def test_what_is_not_a_number_stays_visible():
    x, w, _ = inputs((16, 32), (16, 32), (16, 16))
    with torch.no_grad():
        x[3, 5] = torch.nan
    for fp8 in (FP8(scaling="delayed"), *(FP8(scaling=scaling) for scaling in SCALINGS)):
        y = multiply_in_fp8(x, w, None, build_quantisers(fp8, None), ForwardPassPurpose.TRAINED)
        assert y.isnan().all(1).tolist() == [row == 3 for row in range(16)]
