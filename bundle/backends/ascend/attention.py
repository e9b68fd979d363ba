"""Core attention on npu_fusion_attention: MLA and GQA heads, packed or not, square masks."""

from typing import Any

import torch
from torch import Tensor

from bundle.backends import core_attention
from bundle.backends.ascend.inputs import KernelInputs, Rows, kernel_inputs
from bundle.capabilities import ASCEND, AttentionKernel
from bundle.errors import EnvironmentUnfit, UsageError
from bundle.mcore.packed import on_host


class CoreAttention(core_attention.CoreAttention):
    """A mask is None or bool [b or 1, 1, rows, keys], True = hidden.

    It is never left out in silence, as Transformer Engine does with causal attention: a square one is used,
    any other refused (`inputs.kernel_inputs`: JobFailed), as are boundaries that the kernel would not
    compute. Nothing is kept from one call for the next.
    """

    name = "ascend"

    @staticmethod
    def not_computed(config: Any) -> list[str]:
        wrong = core_attention.CoreAttention.not_computed(config)
        if config.context_parallel_size > 1:
            wrong.append(f"context_parallel_size={config.context_parallel_size}: context parallelism")
        return wrong

    @staticmethod
    def kernel_of(config: Any) -> AttentionKernel:
        return ASCEND.kernel("flash")

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, packed: Any, kind: str
    ) -> Tensor:
        causal, heads = kind in ("causal", "padding_causal"), query.shape[-2]
        rows = _rows(query, key, packed, causal)
        if packed is None:
            query, key, value = (x.flatten(2) for x in (query, key, value))
        inputs = kernel_inputs(mask, rows, causal=causal)
        out = fused(query, key, value, inputs, heads=heads, scale=self.scale, dropout=self.dropped)
        return out.unflatten(-1, (heads, -1)) if packed is None else out


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


def fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inputs: KernelInputs,
    *,
    heads: int,
    scale: float,
    dropout: float,
) -> Tensor:
    """npu_fusion_attention's result for `heads` query heads; laid out like `query`, as wide as the values.

    [t, n, d] where `inputs` has ends of sequences (TND), else [s, b, n * d] (SBH): megatron's own order of
    dimensions, so nothing is copied. Raises EnvironmentUnfit where torch-npu is not loaded.
    """
    operator = getattr(torch.ops.npu, "npu_fusion_attention", None)
    if operator is None:
        raise EnvironmentUnfit(
            "torch has no operator npu::npu_fusion_attention: install the torch-npu that fits this torch and"
            " CANN, and import it before the model is built"
        )
    layout = "SBH" if inputs.actual_seq_qlen is None else "TND"
    result = operator(
        query, key, value, heads, layout, scale=scale, keep_prob=1.0 - dropout, **inputs.keywords()
    )
    out: Tensor = result[0]
    return out
