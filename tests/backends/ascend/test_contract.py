"""The emulated npu_fusion_attention against attention written out in float64, and what it refuses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backends.ascend import limits
from tests.backends.ascend.contract import (
    SCHEMA,
    ContractViolation,
    attention,
    npu_fusion_attention,
    registered,
    rules,
)
from tests.backends.cpu import reference

COMPRESSED = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
LAYOUTS = ("BSH", "SBH", "BSND", "BNSD")
ORDER = {"BSH": "bsnd", "SBH": "sbnd", "BSND": "bsnd", "BNSD": "bnsd"}
SHAPES = st.sampled_from(((4, 4, 8, 8), (4, 2, 8, 8), (6, 1, 12, 8), (2, 2, 24, 16)))  # n, groups, dqk, dv


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).requires_grad_()


def laid(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The layout of [b, s, n, d]."""
    moved = x.permute(*("bsnd".index(letter) for letter in ORDER[layout]))
    return moved.flatten(2) if "H" in layout else moved


def taken(out: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """[b, s, n, d] again."""
    out = out.unflatten(2, (heads, -1)) if "H" in layout else out
    return out.permute(*(ORDER[layout].index(letter) for letter in "bsnd"))


def agree(out, expected, leaves):
    """Values and the gradients of a random weighting are those of float64."""
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)
    weight = torch.randn_like(expected)
    got = torch.autograd.grad(out, leaves, weight.float(), retain_graph=True)
    want = torch.autograd.grad(expected, leaves, weight, allow_unused=True, materialize_grads=True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def seen_by_mode(mode, queries, keys, pre, following):
    """Written out: is key j hidden from query i?"""
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    for i in range(queries):
        for j in range(keys):
            lower = i + keys - queries
            hidden[i, j] = {2: j > i, 3: j > lower, 4: j > lower + following or j < lower - pre}[mode]
    return hidden


@settings(max_examples=40)
@given(
    st.sampled_from(LAYOUTS),
    SHAPES,
    st.integers(1, 9),
    st.integers(0, 4),
    st.sampled_from((None, 0, 1, 2, 3, 4)),
    st.integers(0, 9),
)
def test_whole_sequences(layout, shape, queries, more, mode, seed):
    torch.manual_seed(seed)
    heads, groups, wide, out_wide = shape
    batch, keys = 2, queries + more
    q, k, v = (
        rows(batch, queries, heads, wide),
        rows(batch, keys, groups, wide),
        rows(batch, keys, groups, out_wide),
    )
    options: dict = {}
    hidden = torch.zeros(batch, queries, keys, dtype=torch.bool)
    if mode in (0, 1):
        hidden = torch.rand(batch, queries, keys) < 0.4
        hidden[:, :, 0] = False
        options = {"atten_mask": hidden[:, None], "sparse_mode": mode}
    elif mode is not None:
        pre, following = 2, 1
        hidden = seen_by_mode(mode, queries, keys, pre, following).expand(batch, -1, -1)
        options = {"atten_mask": COMPRESSED, "sparse_mode": mode}
        options |= {"pre_tockens": pre, "next_tockens": following} if mode == 4 else {}
    given_in = (laid(q, layout), laid(k, layout), laid(v, layout))
    out, maxima, sums, *_ = npu_fusion_attention(*given_in, heads, layout, scale=0.3, **options)
    expected = torch.stack(
        [
            reference.one_sequence(q[b].double(), k[b].double(), v[b].double(), 0.3, hidden[b])
            for b in range(batch)
        ]
    )
    agree(taken(out, layout, heads), expected, (q, k, v))
    assert maxima.shape == sums.shape == (batch, heads, queries, 8) and sums.dtype == torch.float32


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), min_size=1, max_size=5).filter(
        lambda pairs: any(queries for queries, _ in pairs)
    ),
    SHAPES,
    st.sampled_from((None, 2, 3)),
    st.integers(0, 9),
)
def test_packed_sequences(pairs, shape, mode, seed):
    torch.manual_seed(seed)
    heads, groups, wide, out_wide = shape
    queries, keys = [q for q, _ in pairs], [q + more for q, more in pairs]
    q = rows(sum(queries), heads, wide)
    k, v = rows(sum(keys), groups, wide), rows(sum(keys), groups, out_wide)
    ends = [torch.tensor(lengths).cumsum(0).tolist() for lengths in (queries, keys)]
    options = {} if mode is None else {"atten_mask": COMPRESSED, "sparse_mode": mode}
    out, maxima, *_ = npu_fusion_attention(
        q, k, v, heads, "TND", scale=0.3, actual_seq_qlen=ends[0], actual_seq_kvlen=ends[1], **options
    )
    pieces = []
    for a, b, c in zip(
        q.double().split(queries), k.double().split(keys), v.double().split(keys), strict=True
    ):
        hidden = torch.zeros(len(a), len(b), dtype=torch.bool)
        if mode is not None:
            hidden = seen_by_mode(mode, len(a), len(b), 0, 0)
        if len(a):
            pieces.append(reference.one_sequence(a, b, c, 0.3, hidden))
    agree(out, torch.cat(pieces), (q, k, v))
    assert maxima.shape == (sum(queries), heads, 8)


def call(layout="BNSD", **options):
    """A call of two rows of 16 with four heads of 8, whatever is said otherwise."""
    shapes = {"BNSD": (2, 4, 16, 8), "SBH": (16, 2, 32), "TND": (32, 4, 8)}
    q = options.pop("query", torch.randn(shapes.get(layout, (2, 4, 16, 8))))
    k, v = options.pop("key", q), options.pop("value", options.pop("key", q))
    return npu_fusion_attention(q, k, v, options.pop("head_num", 4), layout, **options)


def hidden(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bool)


ENDS = {"actual_seq_qlen": [5, 32], "actual_seq_kvlen": [5, 32]}


REFUSED: list[tuple[dict, str]] = [
    ({"layout": "XXX"}, "input_layout is 'XXX'"),
    ({"query": torch.randn(2, 4, 16, 8).double()}, "float64"),
    ({"value": torch.randn(2, 4, 16, 8).half()}, "different dtypes"),
    ({"layout": "SBH", "query": torch.randn(2, 4, 16, 8)}, "4 dimensions, SBH has 3"),
    ({"head_num": 2}, "head_num is 2, and query has 4"),
    ({"key": torch.randn(2, 3, 16, 8)}, "4 heads over 3 key heads"),
    ({"key": torch.randn(2, 4, 16, 4)}, "heads of 8 in query and 4 in key"),
    ({"value": torch.randn(2, 4, 16, 12)}, "value heads of 12 over key heads of 8"),
    ({"query": torch.randn(1, 1, 2, 800), "head_num": 1}, "1 to 768"),
    ({"key": torch.randn(3, 4, 16, 8)}, r"batches of \(2, 3, 2\)"),
    ({"value": torch.randn(2, 4, 15, 8)}, "16 rows of keys and 15"),
    ({"atten_mask": hidden(2, 16)}, r"unsupported atten_mask shape \[2, 16\]"),
    ({"atten_mask": hidden(2, 1, 1, 16)}, r"unsupported atten_mask shape \[2, 1, 1, 16\]"),
    ({"atten_mask": hidden(2, 16, 16)}, "3 dimensions: 2 or 4"),
    ({"atten_mask": hidden(16, 16).float()}, "bool or uint8"),
    ({"atten_mask": hidden(2, 1, 16, 16), "sparse_mode": 2}, r"compressed mask \[2048, 2048\]"),
    ({"atten_mask": ~COMPRESSED, "sparse_mode": 3}, "above the diagonal only"),
    ({"atten_mask": hidden(2, 1, 16, 16), "next_tockens": 0}, "skipped without a word"),
    (
        {"atten_mask": COMPRESSED, "sparse_mode": 4, "next_tockens": -3, "pre_tockens": 2},
        "next_tockens -3",
    ),
    (
        {"atten_mask": COMPRESSED, "sparse_mode": 4, "pre_tockens": -3, "next_tockens": 2},
        "pre_tockens -3",
    ),
    ({"sparse_mode": 7}, "sparse_mode 7 does not exist in BNSD"),
    ({"sparse_mode": 6}, "not emulated"),
    ({"layout": "TND", "sparse_mode": 5, **ENDS}, "sparse_mode 5 does not exist in TND"),
    ({"layout": "TND"}, "actual_seq_qlen: a list of ints"),
    ({"layout": "TND", "actual_seq_qlen": [], "actual_seq_kvlen": []}, "actual_seq_qlen is empty"),
    ({"layout": "TND", **ENDS, "actual_seq_qlen": torch.tensor([5, 32])}, "a list of ints"),
    ({"layout": "TND", **ENDS, "actual_seq_qlen": [20, 12]}, "ends are wanted, not lengths"),
    ({"layout": "TND", **ENDS, "actual_seq_kvlen": [5, 33]}, "ends at 33, and there are 32"),
    ({"layout": "TND", **ENDS, "actual_seq_kvlen": [32]}, "2 ends and actual_seq_kvlen 1"),
    ({"layout": "TND", **ENDS, "actual_seq_kvlen": [0, 32]}, "5 queries has no keys"),
    ({"layout": "TND", **ENDS, "atten_mask": hidden(2, 16)}, r"\[maxSq, maxSkv\] \[27, 27\]"),
    ({"layout": "TND", **ENDS, "atten_mask": ~hidden(27, 27)}, "all 1"),
    (ENDS, "are for TND"),
    ({"keep_prob": 0.0}, "keep_prob is 0.0"),
    ({"keep_prob": 0.9}, r"\[emulation\] dropout"),
    ({"padding_mask": hidden(2, 16)}, "padding_mask is not supported"),
    ({"softmax_layout": "TND"}, "softmax_layout TND with input_layout BNSD"),
    ({"pse": hidden(2, 16)}, "no pse"),
    ({"head_num": 0}, "head_num must be above 0"),
    ({"query": torch.randn(2, 257, 1, 1), "head_num": 257}, "257 heads: up to 256"),
    ({"layout": "TND", **ENDS, "actual_seq_qlen": [-1, 32]}, "begins with -1"),
    ({"layout": "TND", **{name: [1] * 2048 + [32] for name in ENDS}}, "2049 sequences: up to 2048"),
    ({"layout": "TND", **{name: [0] for name in ENDS}}, "no sequence has a query"),
    ({"inner_precise": 3}, "inner_precise is 3"),
    ({"softmax_layout": "BSH"}, "softmax_layout is 'BSH'"),
]


def test_each_limit_refuses_what_is_beyond_it():
    places = set()
    for options, message in REFUSED:
        with pytest.raises(ContractViolation, match=f"emulated .*{message}") as refused:
            call(**options)
        places.add(limits.refused_at(refused.value))
    assert places == limits.of(rules, attention)


def test_without_a_mask_everything_is_seen_whatever_the_mode():
    assert torch.equal(
        call(query=(q := torch.randn(2, 4, 16, 8)), sparse_mode=2, next_tockens=0)[0], call(query=q)[0]
    )


def test_a_mask_of_valid_tokens_passes_for_one_of_queries_and_keys_where_their_sizes_agree():
    q = torch.randn(16, 4, 16, 8)
    valid = torch.ones(16, 16, dtype=torch.bool)
    assert call(query=q, atten_mask=valid)[0].isnan().all()  # True is hidden: nobody sees anything


def test_what_is_undefined_is_not_a_number():
    blind = hidden(1, 1, 16, 16)
    blind[..., 3, :] = True
    undefined, zeros = (call(atten_mask=blind, sparse_mode=1, inner_precise=p)[0] for p in (0, 2))
    assert undefined[:, :, 3].isnan().all() and (zeros[:, :, 3] == 0).all()
    assert undefined.isnan().any(-1).sum() == 8 and not zeros.isnan().any()
    uncovered = call("TND", actual_seq_qlen=[5, 20], actual_seq_kvlen=[5, 20])[0]
    assert uncovered[20:].isnan().all() and not uncovered[:20].isnan().any()
    assert torch.equal(
        call(
            "TND", query=(q := torch.randn(32, 4, 8)), actual_seq_qlen=[5, 20, 0], actual_seq_kvlen=[5, 20, 0]
        )[0][:20],
        call("TND", query=q, actual_seq_qlen=[5, 20], actual_seq_kvlen=[5, 20])[0][:20],
    )


def test_it_is_registered_as_torch_npu_registers_its_own():
    registered()
    operator = torch.ops.npu.npu_fusion_attention
    assert str(operator.default._schema).replace("1.0", "1.") == SCHEMA
    q = torch.randn(2, 4, 16, 8, dtype=torch.bfloat16, requires_grad=True)
    out = operator(q, q, q, 4, "BNSD", atten_mask=COMPRESSED, sparse_mode=2)[0]
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()
