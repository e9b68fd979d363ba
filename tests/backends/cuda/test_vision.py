"""A vision tower's attention on cuda: all windows, or images, in one call of a stand-in for the kernel."""

import sys
from itertools import accumulate
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

from bundle.backends.cuda import vision
from tests.backends.cpu import reference
from tests.backends.cpu.core import agree, inputs
from tests.vision import packed

CALLS: list[tuple[int, ...]] = []  # where the sequences of each ended


class DotProductAttention(torch.nn.Module):
    """What its documentation says of packed sequences, and nothing else; attended one after the other."""

    def __init__(self, num_attention_heads, kv_channels, *, softmax_scale, qkv_format, attn_mask_type):
        super().__init__()
        self.shape, self.scale = (num_attention_heads, kv_channels), softmax_scale

    def forward(
        self, q, k, v, *, qkv_format, attn_mask_type, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv
    ):
        assert (qkv_format, attn_mask_type) == ("thd", "padding")
        for rows, ends in ((q, cu_seqlens_q), (k, cu_seqlens_kv), (v, cu_seqlens_kv)):
            assert rows.is_contiguous() and rows.shape[1:] == self.shape
            assert ends.dtype == torch.int32 and ends.device == rows.device and ends[-1] == len(rows)
        lengths = cu_seqlens_q.diff().tolist()
        assert type(max_seqlen_q) is type(max_seqlen_kv) is int
        assert max_seqlen_q == max_seqlen_kv == max(lengths)
        CALLS.append(tuple(cu_seqlens_q[1:].tolist()))
        out = reference.packed(q, k, v, lengths, lengths, scale=self.scale, causal=False)
        return out.reshape(len(q), -1)


@pytest.fixture(autouse=True)
def transformer_engine(monkeypatch):
    """The package, of which there is this class alone."""
    module: Any = ModuleType("transformer_engine.pytorch")
    module.DotProductAttention = DotProductAttention
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
    vision._build_attention.cache_clear()
    CALLS.clear()
    yield
    vision._build_attention.cache_clear()


@settings(max_examples=25)
@given(st.lists(st.integers(1, 19), min_size=1, max_size=6), st.sampled_from((8, 80)))
def test_every_row_sees_its_own_sequence_and_all_of_it(lengths, wide):
    q, k, v = inputs(sum(lengths), None, heads=2, groups=2, qk=wide, v=wide, dtype=torch.float32)
    out = vision.attend_packed(q, k, v, (0, *accumulate(lengths)), scale=0.3)
    assert out.shape == q.shape
    want = reference.packed(q.double(), k.double(), v.double(), lengths, lengths, scale=0.3, causal=False)
    agree(out, want, (q, k, v), tolerance=1e-4)


@pytest.mark.parametrize("case", packed.TOWERS, ids=lambda case: case.family)
def test_a_whole_tower_computes_what_torchs_attention_does_in_one_call_of_each_layer(case):
    pytest.importorskip("transformers")
    packed.agrees(case, vision.attend_packed)
    assert packed.ends(case) == CALLS
