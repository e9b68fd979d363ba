"""The cpu backend's FP8 beside Transformer Engine's on a GPU: the three products of one linear layer.

Run with `python -m benchmarks.fp8 [--dtype fp32]`. Both take the same operands, with outliers and of sizes
that fill no block. Printed are how many values of the operands FP8 holds otherwise, and relative distances in
the Frobenius norm: between the two results, and of each from the float64 product of what was given. Ends with
1 where more than one value of the operands in a thousand differs, or the results by more than a tenth of what
FP8 costs; says so and ends with 0 where there is no GPU. In bf16 (what models train in) results are rounded
once more, which fp32 leaves out.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from bundle.backends.cuda import load_cudnn_and_transformer_engine
from bundle.capabilities.cuda import CUDA
from bundle.recipe.recipe import FP8

if torch.cuda.is_available():
    load_cudnn_and_transformer_engine()  # before megatron is imported, as in a job
from bundle.backends.cpu.layers import multiply_in_fp8
from bundle.backends.cpu.scaling import E4M3, E5M2, ForwardPassPurpose, build_quantisers
from bundle.mcore import context

TOKENS, INPUTS, OUTPUTS = 528, 1040, 784
# Delayed scales are those of the calls before: three steps of two micro-batches, of growing operands. Weights
# change between steps only.
STEPS, MICRO_BATCHES = 3, 2
GROWTH = 1.5
PRODUCTS = ("output", "input gradient", "weight gradient")
SHARE = 0.1
NEIGHBOURS = 2**-4  # the least relative distance of two normal e4m3 numbers
TIES = 1e-3  # the share of values that the last bit of a scale may move over a tie, to the neighbour
Triple = tuple[Tensor, Tensor, Tensor]


def calls(dtype: torch.dtype) -> list[list[Triple]]:
    """Input, weight and gradient of the output of each micro-batch, by step; gradients are small as ever.

    One value in 200 is thirty times as large. Columns lie up to 2 ** 12 apart, and what multiplies them
    inversely, so that all of them count in the products, and for each value which others share its scale.
    """
    torch.manual_seed(0)
    of_inputs, of_outputs = (torch.exp2(12 * torch.rand(n) - 6) for n in (INPUTS, OUTPUTS))
    x = _outlying(TOKENS, INPUTS) * of_inputs
    weight = _outlying(OUTPUTS, INPUTS) / of_inputs / of_outputs[:, None]
    gradient = _outlying(TOKENS, OUTPUTS) * of_outputs * 1e-4
    return [
        [
            tuple(
                (value * GROWTH**at).to(dtype)
                for value, at in zip((x, weight, gradient), (now, step, now), strict=True)
            )
            for now in range(step * MICRO_BATCHES, (step + 1) * MICRO_BATCHES)
        ]
        for step in range(STEPS)
    ]


def _outlying(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns) * torch.where(torch.rand(rows, columns) > 0.995, 30.0, 1.0)


def emulated(fp8: FP8, dtype: torch.dtype) -> Triple:
    """Output, input gradient and weight gradient of the last call, by the cpu backend."""
    quantisers = build_quantisers(fp8, None)
    for step in calls(dtype):
        with context.schedule_run.set(object()):
            for given in step:
                x, weight = (value.requires_grad_() for value in given[:2])
                output = multiply_in_fp8(x, weight, None, quantisers, ForwardPassPurpose.TRAINED)
                found = (output.detach(), *torch.autograd.grad(output, (x, weight), given[2]))
    return found


def measured(fp8: FP8, dtype: torch.dtype) -> Triple:
    """The same by Transformer Engine's linear layer on the GPU."""
    import transformer_engine.pytorch as te

    layer = te.Linear(INPUTS, OUTPUTS, bias=False, params_dtype=dtype, device="cuda")
    for step in calls(dtype):
        for micro_batch, given in enumerate(step):
            x, weight, gradient = (value.cuda() for value in given)
            x.requires_grad_()
            layer.weight.data.copy_(weight)
            with te.autocast(enabled=True, recipe=_recipe(fp8)):
                output = layer(x, is_first_microbatch=micro_batch == 0)  # as megatron's schedules do
            found = (output.detach(), *torch.autograd.grad(output, (x, layer.weight), gradient))
    return tuple(value.cpu() for value in found)  # type: ignore[return-value]


def exact(dtype: torch.dtype) -> Triple:
    """The same in float64, nothing rounded."""
    x, weight, gradient = (value.double() for value in calls(dtype)[-1][-1])
    return x @ weight.t(), gradient @ weight, gradient.t() @ x


def unequal(fp8: FP8, dtype: torch.dtype) -> tuple[int, int]:
    """How many values of the operands FP8 holds otherwise on the GPU, and of how many.

    Delayed scaling: by the scale of a first call. The last bit of a scale is no difference where it moves no
    value to its neighbour, a hundred times further away.
    """
    ours, given = build_quantisers(fp8, None), calls(dtype)[-1][-1]
    found, whole = 0, 0
    for index, (quantiser, value) in enumerate(
        zip((ours.input, ours.weight, ours.gradient), given, strict=True)
    ):
        wide = value.float()
        theirs = _quantizer(fp8, index)(value.cuda()).dequantize(dtype=torch.float32).cpu()
        ours_of_it = quantiser(wide, ForwardPassPurpose.TRAINED)(wide, 1)
        found += int((~torch.isclose(ours_of_it, theirs, rtol=NEIGHBOURS / 100, atol=0.0)).sum())
        whole += value.numel()
    return found, whole


def distance(one: Tensor, other: Tensor) -> float:
    """Of two results, relative to the second."""
    return float((one.double() - other.double()).norm() / other.double().norm())


def _recipe(fp8: FP8) -> Any:
    """What megatron would give to Transformer Engine for it."""
    from transformer_engine.common import recipe

    format = {"e4m3": recipe.Format.E4M3, "hybrid": recipe.Format.HYBRID}[fp8.format]
    if fp8.scaling == "delayed":
        return recipe.DelayedScaling(fp8_format=format, amax_history_len=1024, amax_compute_algo="max")
    current = {
        "tensorwise": recipe.Float8CurrentScaling,
        "blockwise": recipe.Float8BlockScaling,
        "mxfp8": recipe.MXFP8BlockScaling,
    }
    return current[fp8.scaling](fp8_format=format)


def _quantizer(fp8: FP8, index: int) -> Any:
    """What rounds input, weight or gradient in Transformer Engine's layers under that recipe."""
    from transformer_engine.pytorch.constants import TE_DType
    from transformer_engine.pytorch.tensor import float8_blockwise_tensor, float8_tensor, mxfp8_tensor

    gradient, weight = index == 2, index == 1
    dtype = TE_DType[E5M2 if gradient and fp8.format == "hybrid" else E4M3]
    if fp8.scaling == "delayed":
        scale, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
        return float8_tensor.Float8Quantizer(scale, amax, dtype)
    if fp8.scaling == "tensorwise":
        return float8_tensor.Float8CurrentScalingQuantizer(dtype, torch.device("cuda"))
    if fp8.scaling == "mxfp8":
        return mxfp8_tensor.MXFP8Quantizer(dtype)
    return float8_blockwise_tensor.Float8BlockQuantizer(
        dtype, rowwise=True, columnwise=True, block_scaling_dim=2 if weight else 1
    )


def _all() -> Iterator[FP8]:
    hints = get_type_hints(FP8)
    for scaling in get_args(hints["scaling"]):
        for format in get_args(hints["format"]):
            yield FP8(scaling=scaling, format=format)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of operands and results")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[parser.parse_args().dtype]
    if not torch.cuda.is_available():
        print("There is no GPU here: not run.")
        return 0
    generation = ".".join(map(str, torch.cuda.get_device_capability()))
    reference, wrong = exact(dtype), 0
    print(f"| {'scaling':<10} | {'format':<6} | {'product':<15} | ours - TE | ours - exact | TE - exact |")
    print("|---|---|---|---|---|---|")
    for fp8 in _all():
        if refusal := CUDA.explain_fp8_refusal(fp8.scaling, fp8.format, generation):
            print(f"| {fp8.scaling:<10} | {fp8.format:<6} | not run: {refusal} | | | |")
            continue
        differing, whole = unequal(fp8, dtype)
        wrong += differing > TIES * whole
        told = f"{differing} of {whole} values of the operands differ"
        print(f"| {fp8.scaling:<10} | {fp8.format:<6} | {told} | | | |")
        both = zip(PRODUCTS, emulated(fp8, dtype), measured(fp8, dtype), reference, strict=True)
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
