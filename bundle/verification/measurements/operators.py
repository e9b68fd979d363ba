"""torch-npu's operators as the ascend backend calls them, against float64 on the cpu: values and gradients.

Each operator runs in every type that a recipe can have. A distance is relative to the largest number of its
tensor, and counted in tolerances of its type: 1 is the most that is allowed.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from bundle.verification.numbers import Bench, find_worst, measure_gap

# Not taken from a source: they catch a kernel with bf16's rounding in fp32, and a wrong mask.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
# The arguments of a call: layout, (queries' heads, keys' heads), (width of keys, of values), causal.
_ATTENTION_CASES = (
    ("rows", (4, 2), (64, 64), True),  # GQA
    ("rows", (4, 4), (192, 128), True),  # latent attention
    ("masked rows", (4, 2), (64, 64), True),
    ("packed", (4, 2), (64, 64), True),
    ("packed", (4, 4), (192, 128), True),
    ("packed", (4, 4), (64, 64), False),  # a vision tower
)
_BATCH, _LENGTH = 2, 96
_SEQUENCE_ENDS = (0, 5, 64, 64, 100)  # of packed sequences, one of which is empty


def measure_npu_fusion_attention(bench: Bench) -> float:
    """Measure npu_fusion_attention as backends.ascend.attention calls it, against softmax written out."""
    return find_worst(
        _measure_attention_gap(bench.device, dtype, *case) / tolerance
        for dtype, tolerance in TOLERANCES.items()
        for case in _ATTENTION_CASES
    )


def measure_npu_rms_norm(bench: Bench) -> float:
    """Measure npu_rms_norm against torch's own."""
    from bundle.backends.ascend.operators import find_operator

    return _measure_worst_tolerance_ratio(
        bench.device,
        ((3, 5, 256), (256,)),
        lambda x, weight: find_operator("npu_rms_norm")(x, weight, 1e-6)[0],
        lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-6),
    )


def measure_npu_swiglu(bench: Bench) -> float:
    """Measure npu_swiglu against torch's silu and product."""
    from bundle.backends.ascend.operators import find_operator

    def compute_reference(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    return _measure_worst_tolerance_ratio(
        bench.device, ((3, 5, 256),), lambda x: find_operator("npu_swiglu")(x, -1), compute_reference
    )


def measure_npu_rotary_mul(bench: Bench) -> float:
    """Measure npu_rotary_mul with the angles of positions, against the rotation written out."""
    from bundle.backends.ascend.operators import find_operator

    positions, pairs = torch.arange(16.0), 100.0 ** -torch.linspace(0, 1, 32)
    angles = torch.outer(positions, pairs).repeat(1, 2)[:, None, None]

    def cast_cos_sin(x: Tensor) -> tuple[Tensor, Tensor]:
        # In bf16 sines are rounded before the product: the reference is of the numbers that are given.
        return tuple(part.to(torch.bfloat16).to(x.device, x.dtype) for part in (angles.cos(), angles.sin()))

    def compute_reference(x: Tensor) -> Tensor:
        (cos, sin), (first, second) = cast_cos_sin(x), x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    turn = find_operator("npu_rotary_mul")
    return _measure_worst_tolerance_ratio(
        bench.device, ((16, 2, 4, 64),), lambda x: turn(x, *cast_cos_sin(x), "half"), compute_reference
    )


def measure_ascend_permutation(bench: Bench) -> float:
    """Measure tokens sorted by expert and put back; in between expert n multiplies its rows by n + 1."""
    from bundle.backends.ascend import permutation

    routes = torch.stack([torch.roll(torch.tensor([1, 0, 1, 0, 0]), shift) for shift in range(12)]).bool()
    experts = torch.arange(1, routes.shape[1] + 1)

    def run_kernel(tokens: Tensor, probs: Tensor) -> Tensor:
        device_routes, sizes = routes.to(tokens.device), routes.sum(0)
        sent, weights, places = permutation.fused_permute_with_probs(
            tokens, probs, device_routes, int(sizes.sum())
        )
        rows = sent * (weights * experts.repeat_interleave(sizes).to(weights))[:, None]
        return permutation.fused_unpermute(rows, places, merging_probs=None, restore_shape=tokens.shape)

    def compute_reference(tokens: Tensor, probs: Tensor) -> Tensor:
        return tokens * (probs * routes * experts).sum(1, keepdim=True)

    return _measure_worst_tolerance_ratio(
        bench.device, ((12, 64), tuple(routes.shape)), run_kernel, compute_reference
    )


def measure_npu_grouped_matmul(bench: Bench) -> float:
    """Measure npu_grouped_matmul with our own gradient, against one product after the other."""
    from bundle.backends.ascend import experts

    sizes = (11, 0, 9)  # an expert without a row

    def run_kernel(rows: Tensor, weights: Tensor) -> Tensor:
        ends = torch.tensor(sizes, device=rows.device).cumsum(0)
        return experts.multiply_by_experts(rows, weights.unbind(), ends)

    def compute_reference(rows: Tensor, weights: Tensor) -> Tensor:
        parts = zip(rows.split(sizes), weights, strict=True)
        return torch.cat([part @ weight.t() for part, weight in parts])

    return _measure_worst_tolerance_ratio(
        bench.device, ((sum(sizes), 64), (len(sizes), 32, 64)), run_kernel, compute_reference
    )


def measure_fused_adamw(bench: Bench) -> float:
    """Measure three steps of torch's fused AdamW in fp32, as weights are updated, against float64."""
    seen = []
    for device, dtype in ((bench.device, torch.float32), (torch.device("cpu"), torch.float64)):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 256).to(device, dtype))
        optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.1, fused=device is bench.device)
        for step in range(3):
            weight.grad = torch.linspace(1, -2, 256).to(device, dtype) / (step + 1)
            optimizer.step()
        seen.append({"weight": weight.detach().cpu().double()})
    return measure_gap(*seen) / TOLERANCES[torch.float32]


def _measure_worst_tolerance_ratio(
    device: torch.device,
    shapes: Sequence[tuple[int, ...]],
    kernel: Callable[..., Tensor],
    reference: Callable[..., Tensor],
) -> float:
    """Return the largest distance of a function's value and gradients, in tolerances.

    `shapes` are those of its arguments.
    """
    return find_worst(
        _measure_gap(device, dtype, shapes, kernel, reference) / tolerance
        for dtype, tolerance in TOLERANCES.items()
    )


def _measure_gap(
    device: torch.device,
    dtype: torch.dtype,
    shapes: Sequence[tuple[int, ...]],
    kernel: Callable[..., Tensor],
    reference: Callable[..., Tensor],
) -> float:
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    seen = []
    for function, place, kind in ((kernel, device, dtype), (reference, "cpu", torch.float64)):
        inputs = [x.to(place, kind).requires_grad_() for x in drawn]
        out = function(*inputs)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(8)).to(dtype)
        gradients = torch.autograd.grad(out, inputs, weight.to(place, kind))
        results = (out.detach(), *gradients)
        seen.append({str(number): x.cpu().double() for number, x in enumerate(results)})
    return measure_gap(*seen)


def _measure_attention_gap(
    device: torch.device,
    dtype: torch.dtype,
    layout: str,
    heads: tuple[int, int],
    widths: tuple[int, int],
    causal: bool,
) -> float:
    from bundle.backends.ascend.attention import (
        AttentionCallShape,
        build_mask_arguments,
        call_fused_attention,
    )

    packed = layout == "packed"
    leading = (_SEQUENCE_ENDS[-1],) if packed else (_LENGTH, _BATCH)
    queries, keys = heads
    wide, narrow = widths
    shapes = [(*leading, *shape) for shape in ((queries, wide), (keys, wide), (keys, narrow))]
    scale, mask = wide**-0.5, None
    if layout == "masked rows":  # in the second row the first tokens are hidden, and see themselves
        mask = torch.zeros(_BATCH, 1, _LENGTH, _LENGTH, dtype=torch.bool)
        mask[1, :, :, :7] = True
        mask[1, :, range(7), range(7)] = False

    def run_kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        boundaries = (_SEQUENCE_ENDS, _SEQUENCE_ENDS) if packed else None
        rows = AttentionCallShape(leading[0], leading[0], device, 1 if packed else _BATCH, boundaries)
        inputs = build_mask_arguments(None if mask is None else mask.to(device), rows, causal=causal)
        if not packed:
            query, key, value = (x.flatten(2) for x in (query, key, value))
        out = call_fused_attention(query, key, value, inputs, heads=queries, scale=scale, dropout=0.0)
        return out if packed else out.unflatten(-1, (queries, -1))

    def compute_reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if packed:
            parts = [
                _compute_attention([x[begin:end, None] for x in (query, key, value)], scale, causal, None)[
                    :, 0
                ]
                for begin, end in pairwise(_SEQUENCE_ENDS)
            ]
            return torch.cat(parts)
        return _compute_attention((query, key, value), scale, causal, mask)

    return _measure_gap(device, dtype, shapes, run_kernel, compute_reference)


def _compute_attention(inputs: Sequence[Tensor], scale: float, causal: bool, mask: Tensor | None) -> Tensor:
    """Return [s, b, n, dv] of query, key and value [s, b, heads, d], with every score; `mask` True hides."""
    query, key, value = inputs
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], 2) for x in (key, value))
    scores = torch.einsum("qbnd,kbnd->bnqk", query, key) * scale
    hidden = torch.zeros(scores.shape[-2:], dtype=torch.bool)
    if causal:
        hidden = torch.ones_like(hidden).triu(1)
    if mask is not None:
        hidden = hidden | mask
    return torch.einsum("bnqk,kbnd->qbnd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value)
