"""The emulated operators of rotation and of experts at torch-npu's schemas: numbers, gradients, refusals."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bundle.backends.ascend import permutation

Case = Callable[[int], None]


def cases(refuses: Callable[..., None]) -> dict[str, Case]:
    """Name -> a function of the rank that raises what is wrong; `refuses` asserts that a call is refused."""
    no = {
        "a turn of a part of a head": ("cosines [2, 1, 1, 2]", lambda x: _turn(x, 4, 2)),
        "a turn of an odd head": ("heads of 3", lambda x: _turn(x, 3, 3)),
        "a turn by more than a sine": ("beyond -1 to 1", lambda x: _turn(x * 2, 4, 4)),
        "a turn of rows without a layout": ("no layout", lambda x: _turn(x, 4, 4, rows=3)),
        "groups that are no int64": ("no int64", lambda x: _product(x, [1, 2], dtype=torch.int32)),
        "groups that fall": ("falls", lambda x: _product(x, [2, 1])),
        "groups of fewer rows": ("groups of 1, and there are 2", lambda x: _product(x, [1, 1])),
        "float32 matrices in a list": ("in 2 tensors", lambda x: _product(x, [1, 2], several=True)),
        "a left factor that is transposed": ("not transposed", lambda x: _product(x, [1, 2], turned=True)),
        "a sum of rows not transposed": ("must be transposed", lambda x: _product(x, [1, 3], kind=2)),
        "unequal numbers of experts": ("[1, 2] experts", lambda x: _permute(x, [[1, 0], [1, 1]])),
        "weights of another type": ("float16", lambda x: _permute(x, [[1, 0], [0, 1]], torch.float16)),
        "places that are no int32": ("sorted_indices torch.int64", _unpermute),
    }
    return {
        "rotation": rotation,
        "experts": grouped,
        "permutation": permuted,
        "chunks": chunks,
        **{name: partial(refuses, message, call) for name, (message, call) in no.items()},
    }


def _turn(x: torch.Tensor, width: int, angles: int, rows: int = 2) -> Any:
    t, cos = x.new_ones(2, 2, 2, width), x[0].expand(rows, 1, 1, angles)
    return torch.ops.npu.npu_rotary_mul(t, cos, cos)


def _product(
    x: torch.Tensor,
    ends: list[int],
    dtype: torch.dtype = torch.int64,
    *,
    several: bool = False,
    turned: bool = False,
    kind: int = 0,
) -> Any:
    rows, weights = x.new_ones(2, 3), x.new_ones(2, 3, 4)
    left = x.new_ones(3, 2).t() if turned else rows
    given = list(weights) if several else [weights]
    groups = torch.tensor(ends, dtype=dtype, device=x.device)
    return torch.ops.npu.npu_grouped_matmul([left], given, group_list=groups, split_item=3, group_type=kind)


def _permute(x: torch.Tensor, routes: list[list[int]], dtype: torch.dtype = torch.float32) -> Any:
    chosen = torch.tensor(routes, device=x.device).bool()
    probs = chosen.to(dtype)
    return permutation.fused_permute_with_probs(x.new_ones(2, 4), probs, chosen, len(routes))


def _unpermute(x: torch.Tensor) -> Any:
    places = torch.arange(2, device=x.device)
    return permutation.fused_unpermute(x.new_ones(2, 4), places, merging_probs=None, restore_shape=(2, 4))


def same(rank: int, compute: Callable[..., Any], *leaves: torch.Tensor, bound: float = 1e-6) -> None:
    """`compute(here, *leaves)` gives equal results and gradients on this rank's NPU and on the cpu."""
    found = []
    for device in (f"npu:{rank}", "cpu"):
        own = [leaf.to(device).requires_grad_() for leaf in leaves]
        results = compute(device != "cpu", *own)
        total = sum((result * result.detach().sin()).sum() for result in results)
        gradients = torch.autograd.grad(total, own)
        found.append([x.detach().cpu() for x in (*results, *gradients)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


def rotation(rank: int) -> None:
    """In both modes, by angles of positions and (not interleaved) of rows."""
    torch.manual_seed(7)
    x = torch.randn(5, 2, 3, 8)
    for mode, batch in (("half", 1), ("half", 2), ("interleave", 1)):
        angles = torch.randn(5, batch, 1, 8)

        def turn(here: bool, x: torch.Tensor, mode: str = mode, angles: torch.Tensor = angles) -> Any:
            cos, sin = angles.cos().to(x.device), angles.sin().to(x.device)
            if here:
                return [torch.ops.npu.npu_rotary_mul(x, cos, sin, mode)]
            first, second = x.chunk(2, -1) if mode == "half" else (x[..., ::2], x[..., 1::2])
            parts = (-second, first)
            back = torch.cat(parts, -1) if mode == "half" else torch.stack(parts, -1).flatten(-2)
            return [x * cos + back * sin]

        same(rank, turn, x)


def grouped(rank: int) -> None:
    """Experts with rows, one without, in float32 (one tensor of matrices) and in bf16 (a list of them)."""
    from bundle.backends.ascend import experts

    sizes = (4, 0, 2)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        torch.manual_seed(8)
        rows, weights = torch.randn(6, 4).to(dtype), torch.randn(3, 5, 4).to(dtype)

        def multiply(here: bool, rows: torch.Tensor, weights: torch.Tensor) -> Any:
            if here:
                ends = torch.tensor(sizes, device=rows.device).cumsum(0)
                return [experts.multiply_by_experts(rows, weights.unbind(), ends)]
            parts = zip(rows.split(sizes), weights, strict=True)
            return [torch.cat([part @ weight.t() for part, weight in parts])]

        same(rank, multiply, rows, weights, bound=bound)


def permuted(rank: int) -> None:
    """Tokens go to two experts each and come back, in the order and with the weights of a plain sort."""
    torch.manual_seed(9)
    tokens, probs = torch.randn(4, 3), torch.rand(4, 3)
    chosen = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0]]).bool()
    expert, token = chosen.T.nonzero(as_tuple=True)

    def there_and_back(here: bool, tokens: torch.Tensor, probs: torch.Tensor) -> Any:
        if here:
            routes = chosen.to(tokens.device)
            sent, weights, places = permutation.fused_permute_with_probs(tokens, probs, routes, 8)
            plain, _ = permutation.fused_permute(tokens, routes, 8)
            assert torch.equal(plain, sent)
            rows = sent * weights[:, None]
            back = permutation.fused_unpermute(rows, places, merging_probs=None, restore_shape=(4, 3))
            return [sent, weights, back]
        sent, weights = tokens[token], probs[token, expert]
        return [sent, weights, torch.zeros(4, 3).index_add(0, token, sent * weights[:, None])]

    same(rank, there_and_back, tokens, probs)


def chunks(rank: int) -> None:
    """Chunks of unequal length, one of them empty, come in another order."""
    rows, probs = torch.arange(12.0).view(6, 2), torch.arange(6.0)
    sizes, order = torch.tensor([1, 3, 0, 2]), [3, 0, 2, 1]

    def sort(here: bool, rows: torch.Tensor, probs: torch.Tensor) -> Any:
        if here:
            return permutation.fused_sort_chunks_by_index_with_probs(rows, probs, sizes, torch.tensor(order))
        parts = (x.split(sizes.tolist()) for x in (rows, probs))
        return [torch.cat([part[i] for i in order]) for part in parts]

    same(rank, sort, rows, probs)
