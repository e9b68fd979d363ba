"""What the documentation of torch-npu's operators forbids is refused by their references, each limit by name.

Those of attention stand in test_contract. The real operators refuse less, or with a text that names no cause.
"""

import ast
from pathlib import Path

import pytest
import torch

from bundle.backends import ascend
from tests.backends.ascend import limits
from tests.backends.ascend.contract import ContractViolation
from tests.npu.emulation import experts, operators

KNOWN = {one.__name__: one for one in (*operators.OPERATORS, *experts.OPERATORS)}
NORM, GATE, TURN = "npu_rms_norm", "npu_swiglu", "npu_rotary_mul"
PRODUCT, SEND = "npu_grouped_matmul", "npu_moe_token_permute_with_routing_map"
BACK = "npu_moe_token_unpermute_with_routing_map"


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def ends(*places: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(places, dtype=dtype)


def turned(shape=(4, 2, 2, 8), angles=(4, 1, 1, 8), mode="half", dtype=torch.float32, times=1.0):
    return ones(*shape, dtype=dtype), ones(*angles) * times, ones(*angles), mode


def product(rows=None, weights=None, groups=None, kind=0, **options):
    rows = ones(4, 3) if rows is None else rows
    weights = [ones(2, 3, 5)] if weights is None else weights
    groups = ends(1, 4) if groups is None else groups
    return ([rows], weights), {"group_list": groups, "split_item": 3, "group_type": kind} | options


def several(*shapes, dtype=torch.bfloat16):
    return [ones(*shape, dtype=dtype) for shape in shapes]


ROUTES = torch.tensor([[1, 0], [0, 1], [1, 0]]).bool()
PLACES = ends(0, 1, 2, dtype=torch.int32)
HALF = torch.bfloat16
WIDE = torch.empty(1, 65536)
REFUSED = [
    (NORM, (ones(2, 4), ones(4, dtype=HALF)), {}, "gamma torch.bfloat16"),
    (NORM, (ones(2, 4).double(), ones(4).double()), {}, "input torch.float64"),
    (NORM, (ones(4), ones(4)), {}, "1 dimensions: 2 to 8"),
    (NORM, (ones(*[1] * 8, 4), ones(4)), {}, "9 dimensions"),
    (NORM, (ones(2, 4), ones(2)), {}, "is not the end of"),
    (GATE, (ones(2, 4).double(),), {}, "float64"),
    (GATE, (ones(*[1] * 8, 4),), {}, "9 dimensions: 1 to 8"),
    (GATE, (ones(2, 3),), {}, "is odd"),
    (GATE, (ones(0, 4),), {}, "an empty tensor"),
    (GATE, (ones(4, 2).t(),), {}, "not contiguous"),
    (f"{GATE}_backward", (ones(2, 2, dtype=HALF), ones(2, 4)), {}, "bfloat16 of torch.float32"),
    (f"{GATE}_backward", (ones(2, 2).t(), ones(4, 2).t()), {}, "not contiguous"),
    (TURN, turned(mode="quarter"), {}, "rotary_mode 'quarter'"),
    (TURN, turned(dtype=torch.float64), {}, "float64"),
    (TURN, turned((4, 2, 8), (4, 1, 8)), {}, "3 and 3 dimensions: 4"),
    (TURN, turned((4, 2, 2, 7), (4, 1, 1, 7)), {}, "heads of 7: even, below 896"),
    (TURN, turned((1, 1, 1, 896), (1, 1, 1, 896)), {}, "heads of 896"),
    (TURN, turned(angles=(4, 1, 1, 4)), {}, "cosines"),
    (TURN, turned(angles=(3, 1, 1, 8)), {}, "no layout"),
    (TURN, turned((1, 1, 1000, 8), (1, 1, 1, 8)), {}, "more than 999 heads"),
    (TURN, turned((4, 100, 10, 8), (4, 1, 1, 8), "interleave"), {}, "more than 999 heads"),
    (TURN, turned(times=1.5), {}, "beyond -1 to 1"),
    (TURN, turned(), {"rotate": ones(8, 8)}, "a matrix that rotates"),
    (f"{TURN}_backward", (ones(4, 2, 2, 8, dtype=HALF), *turned()), {}, "bfloat16 of torch.float32"),
    (PRODUCT, *product(bias=[ones(5)]), "'bias'"),
    (PRODUCT, *product(act_type=1), "activations"),
    (PRODUCT, *product(split_item=0), "not one tensor in and one out"),
    (PRODUCT, *product(ones(129, 3, dtype=HALF), several(*[(3, 5)] * 129)), "a list of 129: up to 128"),
    (PRODUCT, *product(kind=1), "group_type 1"),
    (PRODUCT, *product(weights=several((2, 3, 5))), "torch.bfloat16', 'torch.float32"),
    (PRODUCT, *product(weights=several((3, 5), (3, 5), dtype=torch.float32)), "float32 in 2 tensors"),
    (PRODUCT, *product(groups=ends(1, 4, dtype=torch.int32)), "no int64 of one dimension"),
    (PRODUCT, *product(groups=ends(*[4] * 1025)), "1025 groups: 1 to 1024"),
    (PRODUCT, *product(groups=ends(3, 1)), "falls"),
    (PRODUCT, *product(groups=ends(1, 3)), "groups of 3, and there are 4"),
    (PRODUCT, *product(ones(3, 4).t()), "not transposed"),
    (PRODUCT, *product(weights=[ones(3, 5)]), "weights of 2 dimensions: 3"),
    (
        PRODUCT,
        *product(ones(4, 3, dtype=HALF), [*several((3, 5)), ones(5, 3, dtype=HALF).t()]),
        "some weights are transposed",
    ),
    (
        PRODUCT,
        *product(ones(129, 3, dtype=HALF), several((3, 5), (3, 5)), ends(*range(1, 130))),
        "129 groups: up to 128",
    ),
    (PRODUCT, *product(weights=[ones(3, 3, 5)]), "2 groups of 3 matrices"),
    (PRODUCT, *product(ones(4, 3, dtype=HALF), several((3, 5), (3, 6))), "several widths"),
    (PRODUCT, *product(weights=[ones(2, 4, 5)]), "by another width"),
    (PRODUCT, *product(WIDE, [WIDE[None].mT], ends(1)), "65536 values in a row: below 65536"),
    (PRODUCT, *product(ones(3, 4), [ones(4, 5)], kind=2), "must be transposed"),
    (PRODUCT, *product(ones(4, 3).t(), [ones(2, 4, 5)], kind=2), "one weight of 2 dimensions"),
    (PRODUCT, *product(ones(4, 3).t(), [ones(5, 4).t()], kind=2), "weight"),
    (PRODUCT, *product(ones(2, 65536).t(), [ones(2, 5)], ends(1, 2), kind=2), "65536 values in a row and"),
    (SEND, (ones(3, 4), ROUTES), {"drop_and_pad": True}, "drop_and_pad"),
    (SEND, (ones(3, 4).double(), ROUTES), {}, "float64"),
    (SEND, (ones(3, 4), ROUTES.long()), {}, "routing_map torch.int64"),
    (SEND, (ones(3, 4), ROUTES[:2]), {}, "routing_map"),
    (SEND, (ones(3, 4), ROUTES), {"probs": ones(3, 2, dtype=HALF)}, "probs torch.bfloat16"),
    (SEND, (ones(3, 4), ROUTES), {"num_out_tokens": 7}, "7 tokens out of 3 and 2 experts"),
    (SEND, (ones(3, 4), ROUTES | ROUTES[0]), {"num_out_tokens": 3}, r"\[1, 2\] experts a token"),
    (SEND, (ones(1, 4), ones(1, 512).bool()), {"num_out_tokens": 512}, r"\[512\] experts a token"),
    (BACK, (ones(3, 4), PLACES, [3, 4]), {"drop_and_pad": True}, "drop_and_pad"),
    (BACK, (ones(3, 4).double(), PLACES, [3, 4]), {}, "float64"),
    (BACK, (ones(3, 4), ends(0, 1, 2), [3, 4]), {}, "sorted_indices torch.int64"),
    (BACK, (ones(3, 4), PLACES, [3, 5]), {}, r"\[3, 5\]"),
    (BACK, (ones(513, 1), torch.arange(513).int(), [1, 1]), {}, "more than 512 rows"),
    (f"{SEND}_grad", (ones(3, 4), None, PLACES, ROUTES, 2, 3, True), {}, "drop_and_pad"),
    (f"{SEND}_grad", (ones(3, 4), None, PLACES, ROUTES, 2, 4, False), {}, r"\[3, 2\]"),
    (f"{BACK}_grad", (ones(3, 4), PLACES, PLACES, None, None, None, True, [3, 4]), {}, "drop_and_pad"),
    (f"{BACK}_grad", (ones(3, 4), PLACES, PLACES, None, None, None, False, [3, 5]), {}, r"\[3, 5\]"),
]


def test_each_limit_refuses_what_is_beyond_it_by_name():
    places = set()
    for name, given, options, message in REFUSED:
        with pytest.raises(ContractViolation, match=message) as refused:
            KNOWN[name](*given, **options)
        places.add(limits.refused_at(refused.value))
    assert places == limits.of(operators, experts)


def test_every_operator_that_is_called_has_a_reference():
    """By its name in the source; attention's is the contract."""
    called = set()
    for file in Path(next(iter(ascend.__path__))).glob("*.py"):
        calls = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
        for call in calls:
            if getattr(call.func, "id", "") == "find_operator":
                (name,) = call.args
                called.add(ast.literal_eval(name))
    assert called - KNOWN.keys() == {"npu_fusion_attention"} and len(called) == 8
