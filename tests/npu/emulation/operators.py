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


def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """silu of the first half times the second."""
    need(input.dtype in _FLOATS, "doc", f"npu_swiglu: {input.dtype}")
    need(1 <= input.dim() <= 8, "doc", f"npu_swiglu: {input.dim()} dimensions: 1 to 8")
    need(input.shape[dim] % 2 == 0, "doc", f"npu_swiglu: dimension {dim} of {list(input.shape)} is odd")
    need(input.numel() > 0, "doc", "npu_swiglu: an empty tensor")
    need(input.is_contiguous(), "doc", "npu_swiglu: not contiguous")
    a, b = input.float().chunk(2, dim)
    return (a * a.sigmoid() * b).to(input.dtype)


def npu_swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    """The gradient of both halves, written out."""
    need(grad_output.dtype == input.dtype, "doc", f"npu_swiglu: {grad_output.dtype} of {input.dtype}")
    need(grad_output.is_contiguous() and input.is_contiguous(), "doc", "npu_swiglu: not contiguous")
    a, b = input.float().chunk(2, dim)
    g, gate = grad_output.float(), a.sigmoid()
    d_a = g * b * gate * (1 + a * (1 - gate))
    return torch.cat((d_a, g * a * gate), dim).to(input.dtype)


OPERATORS = (npu_rms_norm, npu_rms_norm_backward, npu_swiglu, npu_swiglu_backward)
