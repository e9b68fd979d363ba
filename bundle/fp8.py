"""The FP8 scalings that there are, by Transformer Engine's names, and what holds of each on every backend."""

from typing import Literal, NamedTuple, get_args

Scaling = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
Format = Literal["e4m3", "hybrid"]
FORMAT_NAMES: tuple[Format, ...] = get_args(Format)


class ScalingRule(NamedTuple):
    """What the rows of a matrix, and its features, must be a multiple of before a kernel takes it, and who
    says so; and the number format that is taken where nobody names one.
    """

    row_multiple: int
    source: str
    format: Format


_REASON_FOR_16_ROWS = (
    "measured on one H200 with Transformer Engine 2.14.1: 8 rows pass its own check and then fail in"
    " cublasLt ('Leading dimension requirement on A for FP8 GEMM'), 16 work, forward and backward"
)
_REASON_FOR_32_ROWS = "one scale for each block of 32 rows or columns (OCP MX); not measured: no device"
# Gradients want the width of e5m2 under one scale for a whole tensor; fine scales do without.
SCALINGS: dict[Scaling, ScalingRule] = {
    "delayed": ScalingRule(16, _REASON_FOR_16_ROWS, "hybrid"),
    "tensorwise": ScalingRule(16, _REASON_FOR_16_ROWS, "hybrid"),
    "blockwise": ScalingRule(16, _REASON_FOR_16_ROWS, "e4m3"),
    "mxfp8": ScalingRule(32, _REASON_FOR_32_ROWS, "e4m3"),
}
