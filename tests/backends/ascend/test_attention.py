"""Core attention of ascend, over the emulated operator, against attention written out in float64."""

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bundle.errors import EnvironmentUnfit, JobFailed, UsageError
from tests.backends.ascend.contract import ContractViolation, registered
from tests.backends.ascend.core import core_attention
from tests.backends.cpu import reference
from tests.backends.cpu.core import agree, inputs, pack

pytestmark = pytest.mark.usefixtures("megatron", "emulated")
SHAPES = [
    pytest.param({}, id="plain"),
    pytest.param({"groups": 2}, id="gqa"),
    pytest.param({"qk": 24, "v": 16}, id="mla"),
    pytest.param({"qk": 192, "v": 128, "heads": 2, "groups": 2}, id="deepseek"),
]
FREE = torch.zeros(1, 1, dtype=torch.bool)


def drawn(rows, batch, **shape):
    return inputs(rows, batch, dtype=torch.float32, **shape)


def expected(q, k, v, scale, hidden):
    """[s, b, n * dv]; `hidden` a function of the batch index."""
    q, k, v = (x.double() for x in (q, k, v))
    columns = [reference.one_sequence(q[:, i], k[:, i], v[:, i], scale, hidden(i)) for i in range(q.shape[1])]
    return torch.stack(columns, 1).flatten(2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", ["causal", "no_mask"])
def test_unpacked(shape, mask):
    q, k, v = drawn(21, 3, **shape)
    attention = core_attention(
        mask, heads=q.shape[2], k_channels=q.shape[-1], v_channels=v.shape[-1], softmax_scale=None
    )
    hidden = reference.future(21, 21) if mask == "causal" else FREE.expand(21, 21)
    agree(
        attention(q, k, v),
        expected(q, k, v, q.shape[-1] ** -0.5, lambda i: hidden),
        (q, k, v),
        tolerance=1e-4,
    )


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 19), min_size=1, max_size=5).filter(sum),
    st.booleans(),
    st.sampled_from(SHAPES),
    st.booleans(),
)
def test_packed_sequences(lengths, causal, shape, dummy_batch):
    q, k, v = drawn(sum(lengths), None, **shape.values[0])
    attention = core_attention("causal" if causal else "padding", heads=q.shape[1], softmax_scale=0.3)
    given_in = (x.unsqueeze(1) if dummy_batch else x for x in (q, k, v))
    out = attention(*given_in, packed_seq_params=pack(lengths))
    assert out.dim() == (3 if dummy_batch else 2)
    want = reference.packed(q.double(), k.double(), v.double(), lengths, lengths, scale=0.3, causal=causal)
    agree(out, want, (q, k, v), tolerance=1e-4)


def test_padding_inside_a_pack_is_hidden_by_a_causal_mask_and_refused_without_one(messages):
    lengths, padded = [5, 2, 6], [8, 4, 6]
    q, k, v = drawn(sum(padded), None)
    out = core_attention("causal")(q, k, v, packed_seq_params=pack(lengths, padded))
    want = reference.packed(q.double(), k.double(), v.double(), lengths, padded, scale=0.25, causal=True)
    real = torch.cat([torch.arange(n) < length for n, length in zip(padded, lengths, strict=True)])
    torch.testing.assert_close(out[real].double(), want.flatten(1)[real], rtol=0, atol=1e-5)
    with pytest.raises(UsageError, match="causal mask") as error:
        core_attention("padding")(q, k, v, packed_seq_params=pack(lengths, padded))
    messages(error.value)


@pytest.mark.parametrize("kind", ["arbitrary", "padding", "padding_causal"])
@pytest.mark.parametrize("rows", [1, 2])
def test_square_masks_are_used_and_rows_that_see_nothing_give_zeros(kind, rows):
    q, k, v = drawn(9, 2, groups=2)
    mask = torch.rand(rows, 1, 9, 9) < 0.5
    mask[:, :, 4] = True
    causal = reference.future(9, 9) if kind == "padding_causal" else FREE
    out = core_attention(kind)(q, k, v, mask)
    agree(out, expected(q, k, v, 0.25, lambda i: mask.expand(2, -1, -1, -1)[i, 0] | causal), (q, k, v), 1e-4)
    assert (out[4] == 0).all()


def test_the_last_queries_of_longer_keys():
    q, _, _ = drawn(3, 2)
    _, k, v = drawn(10, 2)
    want = expected(q, k, v, 0.25, lambda i: reference.future(3, 10))
    agree(core_attention()(q, k, v), want, (q, k, v), tolerance=1e-4)


def test_the_mask_type_of_the_call_wins():
    from megatron.core.transformer.enums import AttnMaskType

    x = drawn(9, 2)
    free, causal = core_attention("no_mask"), core_attention()
    assert torch.equal(free(*x, attn_mask_type=AttnMaskType.causal), causal(*x))


def test_no_call_leaves_anything_for_the_next():
    x = drawn(9, 2)
    attention = core_attention()
    before = dict(vars(attention.config))
    mask = torch.rand(2, 1, 9, 9) < 0.5
    calls = [
        lambda layer: layer(*x, None),
        lambda layer: layer(*x, mask),
        lambda layer: layer(*(y[:, 0] for y in x), packed_seq_params=pack([4, 5])),
    ]
    alone = [call(core_attention()) for call in calls]
    for order in ((0, 1, 2, 1, 0), (2, 0, 1, 2)):
        for index in order:
            assert torch.equal(calls[index](attention), alone[index])
    assert dict(vars(attention.config)) == before


@pytest.mark.parametrize("packed", [None, pack([4, 5])])
def test_a_mask_of_valid_tokens_is_refused_at_the_border(packed, messages):
    q, k, v = drawn(9, None if packed else 9)
    valid = torch.ones(9, 9, dtype=torch.bool)
    with pytest.raises(JobFailed, match=r"bool \[9, 9\]") as error:
        core_attention()(q, k, v, valid, packed_seq_params=packed)
    messages(error.value)


def test_low_precision():
    x = inputs(33, 2, dtype=torch.bfloat16)
    out = core_attention()(*x)
    assert out.dtype == torch.bfloat16
    want = expected(*x, 0.25, lambda i: reference.future(33, 33))
    assert (out - want).abs().max() < 2**-7


def test_dropout_is_the_operators_and_only_in_training():
    attention, x = (
        core_attention(attention_dropout=0.1, sequence_parallel=True, tensor_model_parallel_size=2),
        drawn(9, 2),
    )
    with pytest.raises(ContractViolation, match=r"\[emulation\] dropout"):
        attention(*x)
    assert torch.equal(attention.eval()(*x), core_attention()(*x))


@pytest.mark.parametrize(
    ("call", "value"),
    [
        (lambda: core_attention(window_size=(4, 0)), "window_size"),
        (lambda: core_attention()(*drawn(4, 1), attention_bias=torch.zeros(1)), "attention bias"),
        (lambda: core_attention()(*drawn(4, 1, qk=8, v=24)), "heads of 24"),
    ],
)
def test_what_cannot_be_computed_is_refused(call, value, messages):
    with pytest.raises(UsageError, match=value) as error:
        call()
    messages(error.value)


def test_without_torch_npu_it_is_said(monkeypatch, messages):
    assert registered()
    monkeypatch.setattr(torch.ops, "npu", types.SimpleNamespace())
    with pytest.raises(EnvironmentUnfit, match="torch-npu") as error:
        core_attention()(*drawn(4, 1))
    messages(error.value)
