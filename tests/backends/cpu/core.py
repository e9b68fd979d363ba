"""Core attentions on tiny configurations, and random inputs for them."""

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from bundle.backends.cpu.attention import CpuCoreAttention


def core_attention(
    mask: str = "causal", *, heads: int = 4, kernel: str = "auto", cp: int = 1, **fields
) -> CpuCoreAttention:
    """A core attention with the arguments that megatron's layers give it."""
    options = {
        k: fields.pop(k)
        for k in ("k_channels", "v_channels", "softmax_scale", "pg_collection")
        if k in fields
    }
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16 * heads,
        num_attention_heads=heads,
        context_parallel_size=cp,
        attention_backend=AttnBackend[kernel],
        attention_dropout=fields.pop("attention_dropout", 0.0),
        **fields,
    )
    return CpuCoreAttention(
        config=config,
        layer_number=3,
        attn_mask_type=AttnMaskType[mask],
        attention_type="self",
        cp_comm_type="p2p",
        **options,
    )


def inputs(
    rows: int,
    batch: int | None,
    *,
    heads=4,
    groups=4,
    qk=16,
    v=16,
    dtype=torch.float64,
    seed: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Leaf query, key, value: [rows, batch, heads, d], without the batch dimension for packed input."""
    if seed is not None:
        torch.manual_seed(seed)
    shape = (rows,) if batch is None else (rows, batch)
    sizes = ((heads, qk), (groups, qk), (groups, v))
    return tuple(torch.randn(*shape, *size, dtype=dtype).requires_grad_() for size in sizes)  # type: ignore[return-value]


def pack(lengths, padded=None, **fields) -> PackedSeqParams:
    """The packed sequence parameters of these lengths."""

    def ends(sizes):
        return torch.tensor([0, *sizes]).cumsum(0).int()

    if padded is not None:
        fields |= {"cu_seqlens_q_padded": ends(padded), "cu_seqlens_kv_padded": ends(padded)}
    longest = max(padded or lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends(lengths),
        cu_seqlens_kv=ends(lengths),
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **fields,
    )


def close(got: Tensor, want: Tensor, tolerance: float, what: str = "output") -> None:
    """Fails if a value is off by more than `tolerance` of the largest."""
    want = want.to(got.dtype).reshape(got.shape)
    scale = max(1.0, want.abs().max().item()) if want.numel() else 1.0
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * scale, msg=lambda m: f"{what}: {m}")


def agree(out: Tensor, expected: Tensor, leaves, tolerance: float = 1e-9) -> None:
    """Values, and the gradients of a random weighting of them, are equal."""
    close(out, expected, tolerance)
    weight = torch.randn_like(out)
    got = torch.autograd.grad(out, leaves, weight)
    want = torch.autograd.grad(
        expected.reshape(out.shape), leaves, weight, materialize_grads=True, allow_unused=True
    )
    for a, b in zip(got, want, strict=True):
        close(a, b, tolerance, "gradient")
