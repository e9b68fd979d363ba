"""An adapter beside a frozen product in FP8: that product is rounded, and the adapter's are not."""

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core import parallel_state

from bundle.backends.cpu.layers import make_fp8_layer
from bundle.backends.local import DuplicatedLinear
from bundle.mcore.adapters import LowRankDelta, LowRankPair, attach
from bundle.recipe.recipe import FP8
from tests.backends.cpu.fp8 import reference
from tests.backends.cpu.test_layers import config

pytestmark = pytest.mark.usefixtures("megatron")
ROWS, INPUTS, OUTPUTS, RANK, SCALE = 32, 64, 96, 5, 0.7


@pytest.mark.parametrize("scaling", ["tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("number_format", ["e4m3", "hybrid"])
def test_the_frozen_product_alone_is_rounded(monkeypatch, scaling, number_format):
    monkeypatch.setattr(parallel_state, "get_amax_reduction_group", lambda **options: None)
    layer = make_fp8_layer(DuplicatedLinear, FP8(scaling=scaling, format=number_format))(
        INPUTS,
        OUTPUTS,
        config=config(perform_initialization=False, params_dtype=torch.float32),
        init_method=torch.nn.init.normal_,
    )
    weight = torch.nn.init.normal_(layer.weight).detach()
    layer.weight.requires_grad_(False)
    a, b = (torch.nn.Parameter(torch.randn(shape)) for shape in ((RANK, INPUTS), (OUTPUTS, RANK)))
    adapter = LowRankDelta(
        [[LowRankPair(a, b)]], [weight], [OUTPUTS], 1, scale=SCALE, dropout=0.0, dim=None,
        group=None, is_expert=False, sequence_parallel=False,
    )  # fmt: skip
    attach(adapter, layer)
    x, gradient = torch.randn(ROWS // 2, 2, INPUTS, requires_grad=True), torch.randn(ROWS // 2, 2, OUTPUTS)
    y = layer(x)[0]
    y.backward(gradient)

    def double(tensor):
        return tensor.detach().double().flatten(0, -2).numpy()

    x2, g2, w2, a2, b2 = map(double, (x, gradient, weight, a, b))
    product, d_x, _ = reference.products(x2, w2, g2, scaling=scaling, format=number_format)
    low = SCALE * x2 @ a2.T
    wanted = {
        "y": (y, product + low @ b2.T),
        "x": (x.grad, d_x + SCALE * g2 @ b2 @ a2),
        "a": (a.grad, SCALE * (g2 @ b2).T @ x2),
        "b": (b.grad, g2.T @ low),
    }
    assert layer.weight.grad is None
    for name, (value, exact) in wanted.items():
        # A float32 scale of a whole tensor may take a few ties to the other side.
        limit = 3e-3 if scaling == "tensorwise" and name in "yx" else 1e-5
        assert np.linalg.norm(double(value) - exact) < limit * np.linalg.norm(exact), name
    assert np.linalg.norm(product - x2 @ w2.T) > 0.01 * np.linalg.norm(product)
