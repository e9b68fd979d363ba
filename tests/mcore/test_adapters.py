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


def adapter(weights, *, missing: int | None = None, with_magnitudes: bool = False):
    """An adapter of these weights on one rank, and what it adds to rows of each; one expert may have none."""
    from bundle.mcore.adapters import LowRankDelta, LowRankPair

    shapes = (*SHAPES, (SIZES["out"],)) if with_magnitudes else SHAPES
    pairs = [LowRankPair(*(torch.nn.Parameter(torch.randn(*shape)) for shape in shapes)) for _ in weights]
    for weight, (a, b, magnitude) in zip(weights, pairs, strict=True):
        if magnitude is not None:  # not far from the norms
            norms = (weight + SCALE * b @ a).detach().norm(dim=1)
            magnitude.data.clamp_(-1, 1).mul_(0.5).add_(1).mul_(norms)
    alone: dict[str, Any] = {"dim": None, "group": None, "is_expert": False, "sequence_parallel": False}
    given = [[None if number == missing else pair] for number, pair in enumerate(pairs)]

    def formula(x, number=0):
        if number == missing:
            return 0
        a, b, magnitude = pairs[number]
        weight, delta = weights[number].detach().double(), SCALE * b.double() @ a.double()
        if magnitude is None:
            return x.double() @ delta.T
        ratio = magnitude.double() / (weight + delta.detach()).norm(dim=1)
        return x.double() @ (ratio[:, None] * (weight + delta) - weight).T

    made = LowRankDelta(given, weights, [SIZES["out"]], 1, scale=SCALE, dropout=0.0, **alone)
    return made, formula


@pytest.mark.parametrize("with_magnitudes", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_folded_norms_projection_is_adapted_behind_the_norm(biased, with_magnitudes):
    from bundle.mcore.adapters import attach

    layer, x = FoldedNorm(biased=biased), torch.randn(SIZES["rows"], SIZES["columns"], requires_grad=True)
    plain, bias = layer(x)
    made, formula = adapter([layer.weight], with_magnitudes=with_magnitudes)
    attach(made, layer)
    seen, given = layer(x)
    assert given is bias
    wanted = plain + formula(layer.normalized(x))
    _assert_alike(seen, wanted, (x, *made.parameters()))


@pytest.mark.parametrize("returned", [False, True])
def test_rows_are_scaled_without_the_bias(returned):
    """Torch's layer has its bias in its output, and so has megatron's where it does not return the bias."""
    from bundle.mcore.adapters import attach

    layer = torch.nn.Linear(SIZES["columns"], SIZES["out"])
    x = torch.randn(SIZES["rows"], SIZES["columns"], requires_grad=True)
    wanted = layer(x)
    made, formula = adapter([layer.weight], with_magnitudes=True)
    attach(made, layer)
    if returned:
        layer.forward = lambda rows: (F.linear(rows, layer.weight, layer.bias), None)
    seen = layer(x)[0] if returned else layer(x)
    _assert_alike(seen, wanted + formula(x), (x, *made.parameters()))


def test_new_magnitudes_are_norms_of_rows_and_change_nothing():
    """To the last bit with fp32 magnitudes of rows whose squares are exact."""
    weight = torch.randint(-3, 4, (SIZES["out"], SIZES["columns"])).float()
    weight[0] = 0  # a pruned row
    made, _ = adapter([weight], with_magnitudes=True)
    magnitude = made.get_parameter("magnitude0_0")
    made.get_parameter("lora_B0_0").data.zero_()
    made.initialize_magnitudes()
    torch.testing.assert_close(magnitude[1:].data, weight.norm(dim=1)[1:])
    x = torch.randn(SIZES["rows"], SIZES["columns"])
    assert torch.equal(made(x @ weight.T, None, x), x @ weight.T)
    assert torch.equal(made.merge_into(weight, 0), weight)


@pytest.mark.parametrize("with_magnitudes", [False, True])
@pytest.mark.parametrize("missing", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
def test_each_of_grouped_experts_has_its_own_adapter_or_none(dtype, missing, with_magnitudes):
    """In bf16 by one kernel, where torch has it: with what that says of alignment."""
    from bundle.mcore.adapters import attach

    counts = [2, 0, 4, 1]  # one expert is asked by nobody
    layer = Grouped(len(counts)).to(dtype)
    x = torch.randn(sum(counts), SIZES["columns"], dtype=dtype, requires_grad=True)
    plain, _ = layer(x, counts)
    made, formula = adapter(list(layer.parameters()), missing=missing, with_magnitudes=with_magnitudes)
    attach(made.to(dtype), layer)
    seen, bias = layer(x, counts)
    assert bias is None
    rows = enumerate(x.split(counts))
    wanted = plain + torch.cat([formula(own, number) + 0 * own @ layer.weight0.T for number, own in rows])
    _assert_alike(seen, wanted, (x, *made.parameters()))


def _assert_alike(seen, wanted, inputs):
    """Values, and the gradients of all inputs; those of an expert that nobody asks are zero, not missing."""
    share = 1e-5 if seen.dtype == torch.float else 0.05  # of the largest number
    assert (seen - wanted).abs().max() <= share * wanted.abs().max()
    weights = torch.randn_like(seen)
    for mine, theirs in zip(
        torch.autograd.grad((seen * weights).sum(), inputs),
        torch.autograd.grad((wanted * weights).sum(), inputs),
        strict=True,
    ):
        assert (mine - theirs).abs().max() <= share * theirs.abs().max()
