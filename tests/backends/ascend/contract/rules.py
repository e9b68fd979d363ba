"""What npu_fusion_attention demands of a call. Every refusal says who makes the demand.

op: the operator itself refuses (op-plugin's FlashAttentionKernelNpuOpApi.cpp, ops-transformer's tiling).
doc: the documentation of torch_npu forbids it; the device answers with an error, or with wrong numbers.
emulation: allowed there, and not emulated here.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tests.backends.ascend.contract.sizes import LAYOUTS, Sizes

FULL, ALL, LEFT_UP, RIGHT_DOWN, BAND = range(5)
COMPRESSED_MODES = (LEFT_UP, RIGHT_DOWN, BAND)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class ContractViolation(RuntimeError):
    """A call that the operator refuses, or that its documentation forbids."""


def need(holds: object, who: str, what: str) -> None:
    """Raises ContractViolation unless `holds`."""
    if not holds:
        raise ContractViolation(f"emulated npu_fusion_attention: [{who}] {what}")


def tensors(query: Tensor, key: Tensor, value: Tensor, heads: int, layout: str) -> None:
    """Dtypes and dimensions, before any size can be read off them."""
    need(heads > 0, "op", f"head_num must be above 0, and is {heads}")
    need(
        layout.upper() in LAYOUTS,
        "op",
        f"input_layout is {layout!r}: it knows {', '.join(LAYOUTS)}, in any case",
    )
    dims = len(layout)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        need(tensor.dim() == dims, "op", f"{name} has {tensor.dim()} dimensions, {layout} has {dims}")
        need(tensor.dtype in DTYPES, "doc", f"{name} is {tensor.dtype}: float16, bfloat16 or float32")
    need(query.dtype == key.dtype == value.dtype, "doc", "query, key and value are of different dtypes")


def dimensions(of: Sizes, heads: int) -> None:
    """Sizes of heads and batches."""
    need(of.heads == heads, "op", f"head_num is {heads}, and query has {of.heads} heads")
    need(of.groups > 0 and heads % of.groups == 0, "op", f"{heads} heads over {of.groups} key heads")
    need(heads <= 256, "doc", f"{heads} heads: up to 256")
    need(of.head_dim == of.key_dim, "doc", f"heads of {of.head_dim} in query and {of.key_dim} in key")
    need(of.value_dim <= of.key_dim, "doc", f"value heads of {of.value_dim} over key heads of {of.key_dim}")
    need(1 <= of.head_dim <= 768, "doc", f"heads of {of.head_dim}: 1 to 768")
    need(of.value_rows == of.keys, "doc", f"{of.keys} rows of keys and {of.value_rows} of values")
    need(len(set(of.batches)) == 1, "doc", f"batches of {of.batches} in query, key and value")


def ends(given: Sequence[int] | None, name: str, rows: int) -> list[int]:
    """Where sequences end, without those at the end that are not computed."""
    need(given is not None and not isinstance(given, Tensor), "op", f"{name}: a list of ints is needed")
    found = list(given or ())
    need(found, "op", f"{name} is empty")
    while len(found) > 1 and found[-1] == 0:  # trailing zeros: these sequences are not computed
        found.pop()
    need(found[0] >= 0, "doc", f"{name} begins with {found[0]}")
    need(
        all(a <= b for a, b in pairwise(found)), "doc", f"{name} {found} falls: ends are wanted, not lengths"
    )
    need(found[-1] <= rows, "op", f"{name} ends at {found[-1]}, and there are {rows} rows")
    need(len(found) <= 2048, "doc", f"{name} has {len(found)} sequences: up to 2048")
    return found


def mode(sparse_mode: int, layout: str) -> None:
    """Which sparse_mode a layout knows."""
    known = (0, 1, 2, 3, 4, 6, 7, 8) if layout == "TND" else range(7)
    need(sparse_mode in known, "op", f"sparse_mode {sparse_mode} does not exist in {layout}")
    need(sparse_mode <= BAND, "emulation", f"sparse_mode {sparse_mode} (prefixes, cut packs) is not emulated")


def mask(given: Tensor, sparse_mode: int, of: Sizes, *, packed: bool) -> None:
    """Dtype and shape of atten_mask; `of` has the longest sequences of packed input."""
    shape = tuple(given.shape)
    need(given.dtype in (torch.bool, torch.uint8), "op", f"atten_mask is {given.dtype}: bool or uint8")
    need(len(shape) in (2, 4), "op", f"atten_mask has {len(shape)} dimensions: 2 or 4")
    if sparse_mode in COMPRESSED_MODES:
        need(
            shape == (2048, 2048),
            "op",
            f"sparse_mode {sparse_mode} takes the compressed mask [2048, 2048], got {list(shape)}",
        )
        triangle = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
        need(
            torch.equal(given.cpu().bool(), triangle),
            "doc",
            "the compressed mask is 1 above the diagonal only",
        )
        return
    square = (of.queries, of.keys)
    if packed:
        need(
            shape == square,
            "doc",
            f"TND takes one atten_mask [maxSq, maxSkv] {list(square)}, got {list(shape)}",
        )
        need(not given.bool().all(-1).any(), "doc", "TND: a row of atten_mask is all 1")
        return
    batch = of.batches[0]
    allowed = (square, (1, 1, *square), (batch, 1, *square), (batch, of.heads, *square))
    need(
        shape in allowed,
        "op",
        f"get unsupported atten_mask shape {list(shape)}: B={batch} N={of.heads} Sq={of.queries}"
        f" Skv={of.keys} takes BNSS, B1SS, 11SS or SS",
    )


def band(pre: int, following: int, queries: int, keys: int) -> None:
    """pre_tockens and next_tockens below 0."""
    if following < 0:
        need(
            pre >= -following and -following < keys, "doc", f"next_tockens {following} with pre_tockens {pre}"
        )
    if pre < 0:
        need(following >= -pre and -pre < queries, "doc", f"pre_tockens {pre} with next_tockens {following}")
