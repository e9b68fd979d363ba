"""Core attention that treats masks as MindSpeed's does (core_r0.16.0), in a few lines of our own.

A mask that is given goes through as it is; a call without one writes the mode of the compressed mask into the
config that all layers share, and nobody takes it back.
"""

from typing import Any

import torch
from torch import Tensor


class Attention(torch.nn.Module):
    """Takes the place of DotProductAttention in layer specs."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__()
        self.config = config

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """[s, b, n * d] or [t, n * d]; causal."""
        if attention_mask is None:
            self.config.sparse_mode = 2
            attention_mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
        options: dict[str, Any] = {}
        heads, scale = query.shape[-2], query.shape[-1] ** -0.5
        if packed_seq_params is not None:
            ends = packed_seq_params.cu_seqlens_q.tolist()
            options = {"actual_seq_qlen": ends, "actual_seq_kvlen": ends}
        else:
            query, key, value = (x.flatten(2) for x in (query, key, value))
        out: Tensor = torch.ops.npu.npu_fusion_attention(
            query,
            key,
            value,
            heads,
            "TND" if options else "SBH",
            atten_mask=attention_mask,
            scale=scale,
            pre_tockens=65536,
            next_tockens=0,
            sparse_mode=getattr(self.config, "sparse_mode", 0),
            **options,
        )[0]
        return out.flatten(1) if options else out
