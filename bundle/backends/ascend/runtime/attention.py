"""megatron's core attention on npu_fusion_attention: MLA and GQA heads, packed or not, square masks."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from bundle.backends.ascend.runtime.fusion import attend
from bundle.backends.ascend.runtime.inputs import Rows, kernel_inputs
from bundle.capabilities import ASCEND
from bundle.errors import UsageError
from bundle.mcore.packed import on_host

_KERNEL = ASCEND.kernel("flash")


class CoreAttention(torch.nn.Module):
    """Takes the place of DotProductAttention in layer specs, with its arguments in every release from 0.12.

    A mask is never left out in silence, as Transformer Engine does with causal attention: a square one is
    used, any other refused (`inputs.kernel_inputs`). It keeps nothing from one call for the next.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        model_comm_pgs: Any = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        _refuse_unknown(config)
        self.config = config
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        # apply_query_key_layer_scaling is for the range of fp16 and leaves the product as it is.
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)

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
        """[s, b, n * dv] from [s, b, heads, d]; packed (thd): [t, n * dv] from [t, heads, d].

        `attention_mask`: None or bool [b or 1, 1, rows, keys], True = hidden. Raises JobFailed for other
        masks and for boundaries that the kernel would not compute, UsageError for what it takes in no form.
        """
        if attention_bias is not None:
            raise UsageError("npu_fusion_attention is called without attention bias")
        kind = (attn_mask_type or self.attn_mask_type).name
        packed = packed_seq_params if getattr(packed_seq_params, "qkv_format", None) == "thd" else None
        _refuse(kind, "bshd" if packed is None else "thd", query.shape[-1], value.shape[-1])
        causal = kind in ("causal", "padding_causal")
        # The latent attention of 0.12 leaves a batch dimension of 1 in packed input, and wants it back.
        batched = packed is not None and query.dim() == 4
        if batched:
            query, key, value = (x.squeeze(1) for x in (query, key, value))
        rows = _rows(query, key, packed, causal)
        heads = query.shape[-2]
        if packed is None:
            query, key, value = (x.flatten(2) for x in (query, key, value))
        inputs = kernel_inputs(attention_mask, rows, causal=causal)
        dropout = self.dropout if self.training else 0.0
        with self._random(dropout):
            out = attend(query, key, value, inputs, heads=heads, scale=self.scale, dropout=dropout)
        if packed is None:
            return out
        return out.flatten(1).unsqueeze(1) if batched else out.flatten(1)

    def _random(self, dropout: float) -> AbstractContextManager[None]:
        """The random state of dropout: heads differ between TP ranks, so that their dropout must too."""
        if dropout == 0.0 or self.config.sequence_parallel:
            return nullcontext()
        fork: AbstractContextManager[None] = tensor_parallel.get_cuda_rng_tracker().fork()
        return fork


def _rows(query: Tensor, key: Tensor, packed: Any, causal: bool) -> Rows:
    """The rows of one call: [s, b, n, d] or, packed, [t, n, d].

    The kernel knows no gaps between sequences, so that their padding is rows like others: behind every real
    row, where a causal mask hides it. Without one they would be seen.
    """
    if packed is None:
        return Rows(query.shape[0], key.shape[0], query.device, query.shape[1])
    boundaries = []
    for name in ("q", "kv"):
        real, padded = (getattr(packed, f"cu_seqlens_{name}{suffix}") for suffix in ("", "_padded"))
        boundaries.append(on_host(real if padded is None else padded))
        if not causal and boundaries[-1] != on_host(real):
            raise UsageError(
                "packed sequences with padding between them need a causal mask on ascend: the kernel takes"
                " padding for keys; pack without it (context parallel size 1)"
            )
    return Rows(query.shape[0], key.shape[0], query.device, boundaries=(boundaries[0], boundaries[1]))


def _refuse(mask: str, layout: str, qk_head_dim: int, v_head_dim: int) -> None:
    reasons = _KERNEL.refusals(layout=layout, mask=mask, qk_head_dim=qk_head_dim, v_head_dim=v_head_dim)
    if reasons:
        raise UsageError("npu_fusion_attention does not take this model:", reasons)


def _refuse_unknown(config: Any) -> None:
    wrong = []
    if getattr(config, "window_size", None) is not None:
        wrong.append(f"window_size={config.window_size}: sliding windows")
    if getattr(config, "softmax_type", "vanilla") != "vanilla":
        wrong.append(f"softmax_type={config.softmax_type}: softmax sinks")
    if config.context_parallel_size > 1:
        wrong.append(f"context_parallel_size={config.context_parallel_size}: context parallelism")
    if wrong:
        raise UsageError("ascend's core attention does not compute", wrong)
