"""What adapters add where one module is a norm with a projection, or all experts of a rank: Transformer
Engine's layers, by stand-ins that answer as those do."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

SIZES = {"rows": 7, "columns": 16, "out": 24, "rank": 8}
SHAPES = ((SIZES["rank"], SIZES["columns"]), (SIZES["out"], SIZES["rank"]))  # A, B
SCALE = 1.75


class FoldedNorm(torch.nn.Module):
    """A norm and a projection; its answer has the normalized input where that is asked for."""

    def __init__(self, *, biased: bool):
        super().__init__()
        self.return_layernorm_output = False
        self.weight = torch.nn.Parameter(torch.randn(SIZES["out"], SIZES["columns"]))
        self.bias = torch.nn.Parameter(torch.randn(SIZES["out"])) if biased else None

    def normalized(self, x):
        return F.rms_norm(x, x.shape[-1:]) * 1.5

    def forward(self, x):
        normalized = self.normalized(x)
        asked = (normalized,) if self.return_layernorm_output else ()
        product = normalized @ self.weight.T
        if self.bias is not None:
            return (product, self.bias, *asked)
        return ((product, *asked) if asked else product), None


class Grouped(torch.nn.Module):
    """A projection for each expert, whose rows lie behind those of the expert before."""

    def __init__(self, experts: int):
        super().__init__()
        for number in range(experts):
            self.register_parameter(
                f"weight{number}", torch.nn.Parameter(torch.randn(SIZES["out"], SIZES["columns"]))
            )

    def forward(self, x, counts):
        parts = zip(x.split(counts), self.parameters(), strict=True)
        return torch.cat([rows @ weight.T for rows, weight in parts]), None


def adapter(*, missing: int | None = None, experts: int = 1):
    """An adapter on one rank, and what its A and B make of rows of each expert; one expert may have none."""
    from bundle.mcore.adapters import Adapter, LowRankPair

    pairs = [
        LowRankPair(*(torch.nn.Parameter(torch.randn(*shape)) for shape in SHAPES)) for _ in range(experts)
    ]
    alone: dict[str, Any] = {"dim": None, "group": None, "is_expert": False, "sequence_parallel": False}
    given = [[None if number == missing else pair] for number, pair in enumerate(pairs)]

    def formula(x, number=0):
        return 0 if number == missing else SCALE * x @ pairs[number].a.T @ pairs[number].b.T

    return Adapter(given, [SIZES["out"]], 1, scale=SCALE, dropout=0.0, **alone), formula


@pytest.mark.parametrize("biased", [False, True])
def test_a_folded_norms_projection_is_adapted_behind_the_norm(biased):
    from bundle.mcore.adapters import attach

    layer, x = FoldedNorm(biased=biased), torch.randn(SIZES["rows"], SIZES["columns"], requires_grad=True)
    plain, bias = layer(x)
    made, formula = adapter()
    attach(made, layer)
    seen, given = layer(x)
    assert given is bias
    wanted = plain + formula(layer.normalized(x))
    _assert_alike(seen, wanted, (x, *made.parameters()))


@pytest.mark.parametrize("missing", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
def test_each_of_grouped_experts_has_its_own_adapter_or_none(dtype, missing):
    """In bf16 by one kernel, where torch has it: with what that says of alignment."""
    from bundle.mcore.adapters import attach

    counts = [2, 0, 4, 1]  # one expert is asked by nobody
    layer = Grouped(len(counts)).to(dtype)
    x = torch.randn(sum(counts), SIZES["columns"], dtype=dtype, requires_grad=True)
    plain, _ = layer(x, counts)
    made, formula = adapter(missing=missing, experts=len(counts))
    attach(made.to(dtype), layer)
    seen, bias = layer(x, counts)
    assert bias is None
    rows = enumerate(x.split(counts))
    wanted = plain + torch.cat([formula(own, number) + 0 * own @ layer.weight0.T for number, own in rows])
    _assert_alike(seen, wanted, (x, *made.parameters()))


def _assert_alike(seen, wanted, inputs):
    """Values, and the gradients of all inputs; those of an expert that nobody asks are zero, not missing."""
    near = (
        {} if seen.dtype == torch.float else {"atol": 0.05 * wanted.detach().abs().max().item(), "rtol": 0.05}
    )
    torch.testing.assert_close(seen, wanted, **near)
    weights = torch.randn_like(seen)
    for mine, theirs in zip(
        torch.autograd.grad((seen * weights).sum(), inputs),
        torch.autograd.grad((wanted * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, **near)
