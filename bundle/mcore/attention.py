"""Megatron's own core attention."""

import copy

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig


def with_sinks(config: TransformerConfig) -> torch.nn.Module:
    """The unfused attention of a layer, with the heads of this rank and a learned sink for each."""
    config = copy.copy(config)
    config.softmax_type = "learnable"
    made: torch.nn.Module = DotProductAttention(config, 1, AttnMaskType.causal, "self")
    return made
