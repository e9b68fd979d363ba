"""A product that is added to a layer's own output, against the plain sum, whatever memory the output has."""

from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")
from bundle.mcore.adapters import _AddedProduct

TOKENS, WIDTH, RANK = 5, 7, 3


def build_output(kind: str, x: torch.Tensor) -> torch.Tensor:
    """An output [2, tokens, width] of a layer with the input `x`."""
    output = x.exp()
    views = {
        "contiguous": output,
        "view": output.view(-1, WIDTH).view(2, TOKENS, WIDTH),
        "transposed": x.transpose(0, 1).exp().transpose(0, 1),
        "part": torch.cat([output, output], -1)[..., :WIDTH],
    }
    return views[kind]


@pytest.mark.parametrize("kind", ["contiguous", "view", "transposed", "part"])
def test_it_is_the_sum_with_the_gradients_of_the_sum(kind: str):
    torch.manual_seed(3)
    inputs = [torch.randn(shape, dtype=torch.double) for shape in ((2, TOKENS, WIDTH), (2, TOKENS, RANK))]
    inputs.append(torch.randn(WIDTH, RANK, dtype=torch.double))
    results = []
    for is_plain in (True, False):
        x, low, b = (tensor.clone().requires_grad_() for tensor in inputs)
        output = build_output(kind, x)
        # The layer's output is not needed for its own gradient, as that of a matrix product is not.
        output = output * 1.5
        total: Any = output + low @ b.T if is_plain else _AddedProduct.apply(output, low, b)
        (total.sin() * torch.arange(1.0, WIDTH + 1)).sum().backward()
        results.append((total.detach(), x.grad, low.grad, b.grad))
    for plain, added in zip(*results, strict=True):
        torch.testing.assert_close(added, plain)


def test_its_result_may_be_changed_in_place():
    output, low, b = torch.randn(4, WIDTH), torch.randn(4, RANK), torch.randn(WIDTH, RANK)
    low.requires_grad_()
    total: Any = _AddedProduct.apply(output.view(4, WIDTH), low, b)
    total.mul_(2).sum().backward()
    torch.testing.assert_close(low.grad, 2 * b.sum(0).expand(4, RANK))
