"""The cpu backend's FP8 beside Transformer Engine's on a GPU: the three products of one linear layer.

Run with `python -m benchmarks.fp8`. Both take the same bf16 operands, with outliers and of sizes that fill no
block. Printed are relative distances in the Frobenius norm: between the two results, and of each from the
float64 product of what was given. Ends with 1 where the two differ by more than a tenth of what FP8 costs;
says so and ends with 0 where there is no GPU.
"""

import sys
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from bundle.backends.cpu.runtime.fp8.delayed import Phase
from bundle.backends.cpu.runtime.fp8.operands import operands
from bundle.backends.cpu.runtime.fp8.product import product
from bundle.backends.cuda.capabilities import CUDA
from bundle.recipe.model import FP8

TOKENS, INPUTS, OUTPUTS = 528, 1040, 784
# Delayed scales are those of the calls before: three, of growing inputs.
GROWTH = (1.0, 1.5, 2.0)
PRODUCTS = ("output", "input gradient", "weight gradient")
SHARE = 0.1
Triple = tuple[Tensor, Tensor, Tensor]


def calls() -> list[Triple]:
    """Input, weight and gradient of the output of each call, bf16; gradients are small, as they are.

    One value in 200 is thirty times as large. Columns lie up to 2 ** 12 apart, and what multiplies them
    inversely, so that all of them count in the products, and for each value which others share its scale.
    """
    torch.manual_seed(0)
    of_inputs, of_outputs = (torch.exp2(12 * torch.rand(n) - 6) for n in (INPUTS, OUTPUTS))
    x = _outlying(TOKENS, INPUTS) * of_inputs
    weight = _outlying(OUTPUTS, INPUTS) / of_inputs / of_outputs[:, None]
    gradient = _outlying(TOKENS, OUTPUTS) * of_outputs * 1e-4
    return [((x * size).bfloat16(), weight.bfloat16(), (gradient * size).bfloat16()) for size in GROWTH]


def _outlying(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns) * torch.where(torch.rand(rows, columns) > 0.995, 30.0, 1.0)


def emulated(fp8: FP8) -> Triple:
    """Output, input gradient and weight gradient of the last call, by the cpu backend."""
    quantisers = operands(fp8, None)
    for given in calls():
        x, weight = (value.requires_grad_() for value in given[:2])
        output = product(x, weight, None, quantisers, Phase.TRAINED)
        found = (output.detach(), *torch.autograd.grad(output, (x, weight), given[2]))
    return found


def measured(fp8: FP8) -> Triple:
    """The same by Transformer Engine's linear layer on the GPU."""
    import transformer_engine.pytorch as te

    layer = te.Linear(INPUTS, OUTPUTS, bias=False, params_dtype=torch.bfloat16, device="cuda")
    for given in calls():
        x, weight, gradient = (value.cuda() for value in given)
        x.requires_grad_()
        layer.weight.data.copy_(weight)
        with te.autocast(enabled=True, recipe=_recipe(fp8)):
            output = layer(x)
        found = (output.detach(), *torch.autograd.grad(output, (x, layer.weight), gradient))
    return tuple(value.cpu() for value in found)  # type: ignore[return-value]


def exact() -> Triple:
    """The same in float64, nothing rounded."""
    x, weight, gradient = (value.double() for value in calls()[-1])
    return x @ weight.t(), gradient @ weight, gradient.t() @ x


def distance(one: Tensor, other: Tensor) -> float:
    """Of two results, relative to the second."""
    return float((one.double() - other.double()).norm() / other.double().norm())


def _recipe(fp8: FP8) -> Any:
    """What megatron would give to Transformer Engine for it."""
    from transformer_engine.common import recipe

    format = {"e4m3": recipe.Format.E4M3, "hybrid": recipe.Format.HYBRID}[fp8.format]
    if fp8.scaling == "delayed":
        return recipe.DelayedScaling(fp8_format=format, amax_history_len=1024, amax_compute_algo="max")
    names = {"tensorwise": "Float8CurrentScaling", "blockwise": "Float8BlockScaling"}
    names["mxfp8"] = "MXFP8BlockScaling"
    return getattr(recipe, names[fp8.scaling])(fp8_format=format)


def _all() -> Iterator[FP8]:
    hints = get_type_hints(FP8)
    for scaling in get_args(hints["scaling"]):
        for format in get_args(hints["format"]):
            yield FP8(scaling=scaling, format=format)


def main() -> int:
    if not torch.cuda.is_available():
        print("There is no GPU here: not run.")
        return 0
    from bundle.backends.cuda.runtime import libraries

    libraries.load()
    generation = ".".join(map(str, torch.cuda.get_device_capability()))
    reference, wrong = exact(), 0
    print(f"| {'scaling':<10} | {'format':<6} | {'product':<15} | ours - TE | ours - exact | TE - exact |")
    print("|---|---|---|---|---|---|")
    for fp8 in _all():
        if refusal := CUDA.fp8_refusal(fp8.scaling, fp8.format, generation):
            print(f"| {fp8.scaling:<10} | {fp8.format:<6} | not run: {refusal} | | | |")
            continue
        both = zip(PRODUCTS, emulated(fp8), measured(fp8), reference, strict=True)
        for name, ours, theirs, whole in both:
            pairs = ((ours, theirs), (ours, whole), (theirs, whole))
            between, of_ours, of_theirs = (distance(one, other) for one, other in pairs)
            wrong += between > SHARE * of_ours
            print(
                f"| {fp8.scaling:<10} | {fp8.format:<6} | {name:<15} |"
                f" {between:9.1e} | {of_ours:12.4f} | {of_theirs:10.4f} |",
                flush=True,
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
