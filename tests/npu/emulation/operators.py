"""Operators of torch-npu as its documentation describes them, in torch; each refuses what that forbids.

`doc` in a refusal: torch-npu's documentation forbids it; `op`: op-plugin's source does; `emulation`: it
exists, and not here. Forward passes and the gradient operators that torch-npu's own autograd calls.
"""

import torch
from torch import Tensor

from tests.backends.ascend.contract.rules import need

_HALF = (torch.float16, torch.bfloat16)
_FLOATS = (*_HALF, torch.float32)


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(the normalised input, the reciprocal of its root mean square in float32)."""
    what = "npu_rms_norm"
    pairs = {(x, x) for x in _FLOATS} | {(x, torch.float32) for x in _HALF}
    need((input.dtype, gamma.dtype) in pairs, "doc", f"{what}: input {input.dtype}, gamma {gamma.dtype}")
    need(2 <= input.dim() <= 8, "doc", f"{what}: {input.dim()} dimensions: 2 to 8")
    width = gamma.dim()
    need(
        width > 0 and input.shape[-width:] == gamma.shape,
        "doc",
        f"{what}: gamma {list(gamma.shape)} is not the end of {list(input.shape)}",
    )
    x = input.float()
    rstd = (x.square().mean(_last(gamma), keepdim=True) + epsilon).rsqrt()
    return (x * rstd * gamma.float()).to(input.dtype), rstd


def npu_rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of input and gamma, written out."""
    x, g, dims = input.float(), dy.float(), _last(gamma)
    normalised, weighted = x * rstd, g * gamma.float()
    d_x = rstd * (weighted - normalised * (weighted * normalised).mean(dims, keepdim=True))
    d_gamma = (g * normalised).sum(tuple(range(x.dim() - gamma.dim())))
    return d_x.to(input.dtype), d_gamma.to(gamma.dtype)


def _last(gamma: Tensor) -> tuple[int, ...]:
    return tuple(range(-gamma.dim(), 0))


OPERATORS = (npu_rms_norm, npu_rms_norm_backward)
