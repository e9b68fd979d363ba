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


def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """input * r1 + rotated(input) * r2, where r1 and r2 are cosines and sines."""
    _rotary_contract(input, r1, r2, rotary_mode)
    need(rotate is None, "emulation", "npu_rotary_mul: a matrix that rotates")
    x = input.float()
    return (x * r1.float() + _rotated(x, rotary_mode) * r2.float()).to(input.dtype)


def npu_rotary_mul_backward(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of input, cosines and sines, written out: the transpose of a rotation turns back."""
    _rotary_contract(input, r1, r2, rotary_mode)
    need(grad.dtype == input.dtype, "doc", f"npu_rotary_mul: {grad.dtype} of {input.dtype}")
    g, x = grad.float(), input.float()
    d_x = g * r1.float() - _rotated(g * r2.float(), rotary_mode)
    d_r1, d_r2 = ((g * part).sum_to_size(r1.shape).to(r1.dtype) for part in (x, _rotated(x, rotary_mode)))
    return d_x.to(input.dtype), d_r1, d_r2


def _rotated(x: Tensor, mode: str) -> Tensor:
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _turns(x: Tensor, r1: Tensor, mode: str, s: int, b: int, n: int) -> bool:
    """Whether cosines fit x in a layout: those of positions, of rows, or (half mode) of all."""
    batch, heads = x.shape[b], x.shape[n]
    if mode == "interleave":
        return tuple(r1.shape[i] for i in (s, b, n)) == (x.shape[s], 1, 1) and batch * heads < 1000
    shared = r1.shape[s] == x.shape[s] and r1.shape[b] in (1, batch) and r1.shape[n] == 1
    return bool((shared or r1.shape == x.shape) and batch < 1000 and heads < 1000)


def _rotary_contract(x: Tensor, r1: Tensor, r2: Tensor, mode: str) -> None:
    what, size = "npu_rotary_mul", list(x.shape)
    need(mode in ("half", "interleave"), "doc", f"{what}: rotary_mode {mode!r}")
    need(all(t.dtype in _FLOATS for t in (x, r1, r2)), "doc", f"{what}: {x.dtype}, {r1.dtype}, {r2.dtype}")
    need(x.dim() == r1.dim() == 4, "doc", f"{what}: {x.dim()} and {r1.dim()} dimensions: 4")
    need(x.shape[3] % 2 == 0 and x.shape[3] < 896, "doc", f"{what}: heads of {x.shape[3]}: even, below 896")
    need(r1.shape == r2.shape and r1.shape[3] == x.shape[3], "doc", f"{what}: cosines {list(r1.shape)}")
    layouts = ((0, 1, 2), (1, 0, 2), (2, 0, 1))  # where S, B and N stand in SBND, BSND and BNSD
    fits = any(_turns(x, r1, mode, *places) for places in layouts)
    need(fits, "doc", f"{what}: {size} with cosines {list(r1.shape)}: no layout, or more than 999 heads")
    need(bool((r1.abs() <= 1).all() and (r2.abs() <= 1).all()), "doc", f"{what}: beyond -1 to 1")


OPERATORS = (
    npu_rms_norm,
    npu_rms_norm_backward,
    npu_swiglu,
    npu_swiglu_backward,
    npu_rotary_mul,
    npu_rotary_mul_backward,
)
