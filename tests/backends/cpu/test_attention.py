"""Core attention of one rank against attention written out in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bundle.errors import JobFailed, UsageError
from tests.backends.cpu import reference
from tests.backends.cpu.core import agree, core_attention, inputs, pack

pytestmark = pytest.mark.usefixtures("megatron")
SHAPES = [
    pytest.param({}, id="plain"),
    pytest.param({"groups": 2}, id="gqa"),
    pytest.param({"groups": 1, "qk": 24, "v": 16}, id="mla"),
    pytest.param({"qk": 8, "v": 24}, id="wide-values"),
]


def unpacked(q, k, v, scale, hidden):
    """[s, b, n * dv]; `hidden` a function of the batch index."""
    columns = [reference.one_sequence(q[:, i], k[:, i], v[:, i], scale, hidden(i)) for i in range(q.shape[1])]
    return torch.stack(columns, 1).flatten(2)


def test_a_backend_that_does_not_say_what_it_computes_has_no_core_attention():
    from bundle.backends.core_attention import BaseCoreAttention

    class Unsaid(BaseCoreAttention):
        name = "unsaid"

    with pytest.raises(TypeError, match="abstract"):
        Unsaid()  # type: ignore[abstract,call-arg]
    assert Unsaid.__abstractmethods__ == {"attend", "select_kernel"}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", ["causal", "no_mask"])
def test_unpacked(shape, mask):
    q, k, v = inputs(21, 3, **shape)
    attention = core_attention(mask, k_channels=q.shape[-1], v_channels=v.shape[-1])
    hidden = reference.future(21, 21) if mask == "causal" else torch.zeros(21, 21, dtype=torch.bool)
    agree(attention(q, k, v, None), unpacked(q, k, v, q.shape[-1] ** -0.5, lambda i: hidden), (q, k, v))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 19), st.integers(0, 4)), min_size=1, max_size=5).filter(
        lambda sizes: sum(map(sum, sizes)) > 0
    ),
    st.booleans(),
    st.sampled_from(SHAPES),
    st.booleans(),
)
def test_packed_sequences(sizes, causal, shape, dummy_batch):
    lengths, padded = [n for n, _ in sizes], [n + extra for n, extra in sizes]
    q, k, v = inputs(sum(padded), None, **shape.values[0])
    attention = core_attention("causal" if causal else "padding", softmax_scale=0.3)
    psp = pack(lengths, padded if lengths != padded else None)
    # 0.12's latent attention leaves the dummy batch dimension in.
    given_in = (x.unsqueeze(1) if dummy_batch else x for x in (q, k, v))
    out = attention(*given_in, None, packed_seq_params=psp)
    assert out.dim() == (3 if dummy_batch else 2)
    agree(out, reference.packed(q, k, v, lengths, padded, scale=0.3, causal=causal), (q, k, v))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_masks(causal, side):
    q, k, v = inputs(13, 3, groups=2)
    lengths = torch.tensor([13, 7, 1])
    position = torch.arange(13)
    absent = position >= lengths[:, None] if side == "right" else position < 13 - lengths[:, None]
    attention = core_attention("padding_causal" if causal else "padding")

    def hidden(i):
        future = reference.future(13, 13) if causal else torch.zeros(13, 13, dtype=torch.bool)
        return absent[i][None] | future

    out = attention(q, k, v, absent[:, None, None])
    assert torch.isfinite(out).all()
    agree(out, unpacked(q, k, v, 0.25, hidden), (q, k, v))


@pytest.mark.parametrize("shape", [(2, 1, 9, 9), (1, 1, 9, 9), (2, 4, 9, 9)])
def test_arbitrary_masks(shape):
    q, k, v = inputs(9, 2)
    mask = torch.rand(shape) < 0.5
    mask[..., 0, :] = True
    attention = core_attention("arbitrary")
    agree(
        attention(q, k, v, mask),
        unpacked(q, k, v, 0.25, lambda i: mask.expand(2, *mask.shape[1:])[i]),
        (q, k, v),
    )


def test_a_mask_argument_means_nothing_to_causal_attention():
    q, k, v = inputs(9, 2)
    attention = core_attention("causal")
    nothing = torch.ones(2, 1, 9, 9, dtype=torch.bool)
    assert torch.equal(attention(q, k, v, nothing), attention(q, k, v, None))


def test_the_mask_type_of_the_call_wins():
    from megatron.core.transformer.enums import AttnMaskType

    q, k, v = inputs(9, 2)
    free, causal = core_attention("no_mask"), core_attention("causal")
    assert torch.equal(free(q, k, v, None, attn_mask_type=AttnMaskType.causal), causal(q, k, v, None))


def test_queries_at_the_end_of_longer_keys():
    q, _, _ = inputs(3, 2)
    _, k, v = inputs(10, 2)
    agree(
        core_attention("causal")(q, k, v, None),
        unpacked(q, k, v, 0.25, lambda i: reference.future(3, 10)),
        (q, k, v),
    )


def test_query_key_layer_scaling_changes_no_value():
    q, k, v = inputs(9, 2)
    scaled = core_attention("causal", apply_query_key_layer_scaling=True)
    assert torch.equal(scaled(q, k, v, None), core_attention("causal")(q, k, v, None))


def test_low_precision_is_computed_in_float32():
    q, k, v = inputs(33, 2, dtype=torch.bfloat16)
    out = core_attention("causal")(q, k, v, None)
    assert out.dtype == torch.bfloat16
    exact = unpacked(q.double(), k.double(), v.double(), 0.25, lambda i: reference.future(33, 33))
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-5)  # rounded once, at the end


def test_dropout_uses_megatrons_random_tracker():
    from megatron.core import tensor_parallel

    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("model-parallel-rng", 5)
    attention = core_attention("causal", attention_dropout=0.25)
    q, k, v = inputs(400, 2, heads=2, groups=2, dtype=torch.float32)
    ones = torch.ones_like(v)
    outside, inside = torch.get_rng_state(), tracker.get_states()["model-parallel-rng"].clone()
    out = attention(q, k, ones, None)
    assert torch.equal(torch.get_rng_state(), outside)
    assert not torch.equal(tracker.get_states()["model-parallel-rng"], inside)
    assert out.std() > 0.01 and out.mean().item() == pytest.approx(1.0, abs=0.02)
    tracker.set_states({"model-parallel-rng": inside})
    assert torch.equal(attention(q, k, ones, None), out)
    torch.testing.assert_close(attention.eval()(q, k, ones, None), torch.ones_like(out))
    tracker.reset()


def test_flash_refuses_packed_heads_of_two_sizes_and_arbitrary_masks(messages):
    attention = core_attention("causal", kernel="flash")
    q, k, v = inputs(12, None, qk=24, v=16)
    with pytest.raises(UsageError, match=r"24.*16") as error:
        attention(q, k, v, None, packed_seq_params=pack([8, 4]))
    messages(error.value)
    padded = torch.nn.functional.pad(v, (0, 8))
    assert attention(q, k, padded, None, packed_seq_params=pack([8, 4])).shape == (12, 4 * 24)
    with pytest.raises(UsageError, match="arbitrary") as error:
        core_attention("arbitrary", kernel="flash")(*inputs(4, 1), None)
    messages(error.value)
    assert core_attention("causal", kernel="fused")(q, k, v, None, packed_seq_params=pack([8, 4])).shape == (
        12,
        64,
    )


@pytest.mark.parametrize(
    ("call", "kind", "value"),
    [
        (lambda a, x: a(*x, None, attention_bias=torch.zeros(1)), UsageError, "attention bias"),
        (lambda a, x: a(*x, torch.zeros(2, 8, dtype=torch.bool)), JobFailed, "[2, 8]"),
        (lambda a, x: a(*x, torch.zeros(2, 1, 1, 8)), JobFailed, "float32"),
        (lambda a, x: a(*x, torch.zeros(2, 1, 1, 7, dtype=torch.bool)), JobFailed, "8 keys"),
    ],
)
def test_what_cannot_be_computed_is_refused(call, kind, value, messages):
    with pytest.raises(kind) as error:
        call(core_attention("padding"), inputs(8, 2))
    assert value in str(error.value)
    messages(error.value)


def test_packed_mistakes_are_refused(messages):
    attention, x = core_attention("causal"), inputs(12, None)
    with pytest.raises(JobFailed, match=r"11.*12") as error:
        attention(*x, None, packed_seq_params=pack([8, 3]))
    messages(error.value)
    other = pack([8, 4])
    other.cu_seqlens_kv = torch.tensor([0, 6, 12])
    with pytest.raises(JobFailed, match="self-attention") as error:
        attention(*x, None, packed_seq_params=other)
    messages(error.value)
