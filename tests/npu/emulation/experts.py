"""torch-npu's operators of mixtures of experts, as its documentation describes them; see `operators`."""

from typing import Any

import torch
from torch import Tensor

from tests.backends.ascend.contract.rules import need

_HALF = (torch.float16, torch.bfloat16)
_FLOATS = (*_HALF, torch.float32)


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    **others: Any,
) -> list[Tensor]:
    """A product for each group: of rows of x by its matrix (0), or of parts of what is summed over (2)."""
    what = "npu_grouped_matmul"
    need(not any(value for value in others.values()), "emulation", f"{what}: {sorted(others)}")
    need(not act_type and group_list_type in (0, 1), "emulation", f"{what}: activations, pairs of groups")
    need(len(x) == 1 and split_item in (2, 3), "emulation", f"{what}: not one tensor in and one out")
    need(len(weight) <= 128, "doc", f"{what}: a list of {len(weight)}: up to 128")
    need(group_type in (0, 2), "doc", f"{what}: group_type {group_type} of x in one tensor")
    (a,), dtypes = x, {t.dtype for t in (*x, *weight)}
    need(len(dtypes) == 1 and a.dtype in _FLOATS, "doc", f"{what}: {sorted(map(str, dtypes))}")
    need(a.dtype in _HALF or len(weight) == 1, "doc", f"{what}: float32 in {len(weight)} tensors: 1")
    sizes = _sizes(group_list, group_list_type, a.shape[0 if group_type == 0 else 1])
    return [_by_rows(a, weight, sizes) if group_type == 0 else _by_summed(a, weight, sizes)]


def _sizes(given: Tensor | None, kind: int | None, total: int) -> list[int]:
    what = "npu_grouped_matmul"
    fits = given is not None and given.dtype == torch.int64 and given.dim() == 1
    if not fits or given is None:
        need(False, "doc", f"{what}: group_list is no int64 of one dimension")
        return []
    need(1 <= len(given) <= 1024, "doc", f"{what}: {len(given)} groups: 1 to 1024")
    sizes = given if kind == 1 else torch.diff(given, prepend=given.new_zeros(1))
    need(bool((sizes >= 0).all()), "doc", f"{what}: group_list {given.tolist()} falls")
    need(int(sizes.sum()) == total, "doc", f"{what}: groups of {int(sizes.sum())}, and there are {total}")
    found: list[int] = sizes.tolist()
    return found


def _by_rows(a: Tensor, weight: list[Tensor], sizes: list[int]) -> Tensor:
    what = "npu_grouped_matmul"
    need(a.dim() == 2 and a.is_contiguous(), "doc", f"{what}: x {list(a.shape)} {a.stride()}: not transposed")
    of = 3 if len(weight) == 1 else 2
    need(all(w.dim() == of for w in weight), "doc", f"{what}: weights of {weight[0].dim()} dimensions: {of}")
    need(len({_transposed(w) for w in weight}) == 1, "doc", f"{what}: some weights are transposed")
    need(len(weight) == 1 or len(sizes) <= 128, "doc", f"{what}: {len(sizes)} groups: up to 128")
    matrices = list(weight[0]) if of == 3 else weight
    need(len(matrices) == len(sizes), "doc", f"{what}: {len(sizes)} groups of {len(matrices)} matrices")
    need(len({w.shape[1] for w in matrices}) == 1, "doc", f"{what}: matrices of several widths")
    need(all(w.shape[0] == a.shape[1] for w in matrices), "doc", f"{what}: {list(a.shape)} by another width")
    inner = max(a.shape[1], *(w.shape[0 if _transposed(w) else 1] for w in matrices))
    need(inner < 65536, "doc", f"{what}: {inner} values in a row: below 65536")
    return torch.cat([part @ w for part, w in zip(a.split(sizes), matrices, strict=True)])


def _by_summed(a: Tensor, weight: list[Tensor], sizes: list[int]) -> Tensor:
    what = "npu_grouped_matmul"
    need(
        a.dim() == 2 and _transposed(a), "doc", f"{what}: x {list(a.shape)} {a.stride()}: must be transposed"
    )
    need(len(weight) == 1 and weight[0].dim() == 2, "doc", f"{what}: one weight of 2 dimensions")
    (w,) = weight
    need(w.is_contiguous() and len(w) == a.shape[1], "doc", f"{what}: weight {list(w.shape)} {w.stride()}")
    need(max(a.shape[0], w.shape[1]) < 65536, "doc", f"{what}: 65536 values in a row and more")
    return torch.stack([p @ q for p, q in zip(a.split(sizes, 1), w.split(sizes), strict=True)])


def _transposed(matrix: Tensor) -> bool:
    return not matrix.is_contiguous() and matrix.mT.is_contiguous()


def npu_moe_token_permute_with_routing_map(
    tokens: Tensor,
    routing_map: Tensor,
    *,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens sorted by expert, their weights, the place of each token's n-th expert)."""
    what = "npu_moe_token_permute_with_routing_map"
    need(not drop_and_pad, "emulation", f"{what}: drop_and_pad")
    need(tokens.dim() == 2 and tokens.dtype in _FLOATS, "doc", f"{what}: {list(tokens.shape)} {tokens.dtype}")
    _routes(what, routing_map, len(tokens))
    if probs is not None:
        _weights(what, probs, routing_map, tokens)
    asked, (count, experts) = num_out_tokens, routing_map.shape
    out = count if asked is None else asked
    need(0 <= out <= count * experts, "doc", f"{what}: {out} tokens out of {count} and {experts} experts")
    each = routing_map.bool().sum(1)
    need(bool((each == out // count).all()) and out // count < 512, "doc",
         f"{what}: {sorted(set(each.tolist()))} experts a token, and {out} / {count} tokens out")  # fmt: skip
    source = _sorted(routing_map)
    weights = tokens.new_empty(0) if probs is None else probs.T.masked_select(routing_map.T.bool())
    return tokens[source], weights, source.argsort(stable=True).int()


def npu_moe_token_permute_with_routing_map_grad(
    permuted_token_out_grad: Tensor,
    probs_grad: Tensor | None,
    sorted_indices: Tensor,
    routing_map: Tensor,
    experts_num: int,
    tokens_num: int,
    drop_and_pad: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of tokens and of the router's weights."""
    what = "npu_moe_token_permute_with_routing_map_grad"
    need(not drop_and_pad, "emulation", f"{what}: drop_and_pad")
    need(tuple(routing_map.shape) == (tokens_num, experts_num), "doc", f"{what}: {list(routing_map.shape)}")
    tokens = _put_back(permuted_token_out_grad, sorted_indices, tokens_num)
    if probs_grad is None or not probs_grad.numel():
        return tokens, tokens.new_empty(0)
    weights = probs_grad.new_zeros(experts_num, tokens_num)
    return tokens, weights.masked_scatter(routing_map.T.bool(), probs_grad).T.contiguous()


def npu_moe_token_unpermute_with_routing_map(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: list[int],
    *,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    drop_and_pad: bool = False,
) -> Tensor:
    """Tokens, each the sum of its rows."""
    return _npu_moe_token_unpermute_with_routing_map(
        permuted_tokens, sorted_indices, restore_shape, probs=probs, routing_map=routing_map,
        drop_and_pad=drop_and_pad,
    )[0]  # fmt: skip


def _npu_moe_token_unpermute_with_routing_map(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: list[int],
    *,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(tokens, and three that the gradient operator takes in other modes)."""
    what = "npu_moe_token_unpermute_with_routing_map"
    need(not drop_and_pad and probs is None, "emulation", f"{what}: weights, drop_and_pad")
    rows, places = permuted_tokens, sorted_indices
    need(rows.dim() == 2 and rows.dtype in _FLOATS, "doc", f"{what}: {list(rows.shape)} {rows.dtype}")
    need(places.dtype == torch.int32 and places.shape == rows.shape[:1], "doc",
         f"{what}: sorted_indices {places.dtype} {list(places.shape)}: int32 [{len(rows)}]")  # fmt: skip
    need(len(restore_shape) == 2 and restore_shape[1] == rows.shape[1], "doc", f"{what}: {restore_shape}")
    need(len(rows) // restore_shape[0] <= 512, "doc", f"{what}: more than 512 rows of a token")
    nothing = places.new_empty(0)
    return _put_back(rows, places, restore_shape[0]), nothing, nothing, rows.new_empty(0)


def npu_moe_token_unpermute_with_routing_map_grad(
    unpermuted_tokens_grad: Tensor,
    out_index: Tensor,
    permuted_token_id: Tensor,
    routing_map: Tensor | None,
    permuted_tokens: Tensor | None,
    probs: Tensor | None,
    drop_and_pad: bool,
    restore_shape: list[int],
) -> tuple[Tensor, Tensor]:
    """The gradient of the permuted tokens; `out_index` is sorted_indices where nothing is padded."""
    what = "npu_moe_token_unpermute_with_routing_map_grad"
    need(not drop_and_pad and probs is None, "emulation", f"{what}: weights, drop_and_pad")
    need(list(unpermuted_tokens_grad.shape) == list(restore_shape), "doc", f"{what}: {restore_shape}")
    each = len(out_index) // restore_shape[0]
    rows = unpermuted_tokens_grad.new_empty(len(out_index), restore_shape[1])
    rows[out_index.long()] = unpermuted_tokens_grad.repeat_interleave(each, 0)
    return rows, rows.new_empty(0)


def _routes(what: str, routing_map: Tensor, tokens: int) -> None:
    fits = routing_map.dim() == 2 and len(routing_map) == tokens
    need(fits and routing_map.dtype in (torch.bool, torch.int8), "doc",
         f"{what}: routing_map {routing_map.dtype} {list(routing_map.shape)}")  # fmt: skip


def _weights(what: str, probs: Tensor, routing_map: Tensor, tokens: Tensor) -> None:
    wide = tokens.dtype is torch.bfloat16 and probs.dtype is torch.float32
    need(probs.shape == routing_map.shape and (wide or probs.dtype == tokens.dtype), "doc",
         f"{what}: probs {probs.dtype} {list(probs.shape)} of {tokens.dtype}")  # fmt: skip


def _sorted(routing_map: Tensor) -> Tensor:
    """The token of each row, sorted by expert."""
    experts, token = routing_map.T.bool(), torch.arange(len(routing_map))
    return token.expand(experts.shape).masked_select(experts)


def _put_back(rows: Tensor, places: Tensor, tokens: int) -> Tensor:
    """Tokens, each the sum of its rows in the order of its experts."""
    return rows[places.long()].unflatten(0, (tokens, -1)).sum(1, dtype=torch.float32).to(rows.dtype)


OPERATORS = (
    npu_grouped_matmul,
    npu_moe_token_permute_with_routing_map,
    npu_moe_token_permute_with_routing_map_grad,
    npu_moe_token_unpermute_with_routing_map,
    _npu_moe_token_unpermute_with_routing_map,
    npu_moe_token_unpermute_with_routing_map_grad,
)
