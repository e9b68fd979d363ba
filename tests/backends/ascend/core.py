"""Core attentions of ascend on tiny configurations, over the emulated operator."""

import pytest

pytest.importorskip("megatron.core")

from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from bundle.backends.ascend.attention import AscendCoreAttention


def core_attention(mask: str = "causal", *, heads: int = 4, **fields) -> AscendCoreAttention:
    """A core attention with the arguments that megatron's layers give it."""
    options = {
        name: fields.pop(name) for name in ("k_channels", "v_channels", "softmax_scale") if name in fields
    }
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16 * heads,
        num_attention_heads=heads,
        attention_dropout=fields.pop("attention_dropout", 0.0),
        **fields,
    )
    return AscendCoreAttention(
        config=config,
        layer_number=3,
        attn_mask_type=AttnMaskType[mask],
        attention_type="self",
        cp_comm_type="p2p",
        **options,
    )
