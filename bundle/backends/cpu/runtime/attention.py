"""megatron's core attention for the cpu: MLA and GQA heads, packed or not, padding, context parallelism."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from bundle.backends.cpu.runtime.gather import gather_in_order
from bundle.backends.cpu.runtime.inputs import call_layout, hidden_keys
from bundle.backends.cpu.runtime.kernel import attend
from bundle.capabilities import CPU
from bundle.errors import UsageError


class CoreAttention(torch.nn.Module):
    """Takes the place of TEDotProductAttention in layer specs, with its arguments in every release from 0.12.

    `config.attention_backend` chooses the kernel whose refusals hold (backends.attention). Masks have
    Transformer Engine's meaning: with causal and no_mask a mask argument is not looked at, and packed input
    goes by its boundaries alone.
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
        # apply_query_key_layer_scaling divides by the layer's number before the softmax and multiplies inside
        # it, for the range of fp16: the product is this scale.
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        backend = getattr(config, "attention_backend", None)
        name = (
            backend.name if backend is not None and backend.name in ("flash", "fused", "unfused") else "auto"
        )
        self.kernel = CPU.kernel(name)
        groups = pg_collection if pg_collection is not None else model_comm_pgs
        self.cp_group: dist.ProcessGroup | None = getattr(groups, "cp", None)

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

        `attention_mask`: bool, True = hidden: [b, 1, 1, keys] for padding, any shape that broadcasts to
        [b, n, rows, keys] for arbitrary; keys are those of this rank, or of the whole sequence.
        """
        if attention_bias is not None:
            raise UsageError("the cpu's core attention takes no attention bias")
        kind = (attn_mask_type or self.attn_mask_type).name
        packed = packed_seq_params if getattr(packed_seq_params, "qkv_format", None) == "thd" else None
        self._refuse(kind, "bshd" if packed is None else "thd", query.shape[-1], value.shape[-1])
        flat = query.dim() == 3
        if flat:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        group = self._group(packed_seq_params)
        causal = kind in ("causal", "padding_causal")
        layout = call_layout(query, key, packed, group, causal=causal)
        hidden = None
        if packed is None and attention_mask is not None and kind not in ("causal", "no_mask"):
            hidden = hidden_keys(attention_mask, layout, group)
        if group is not None and layout.order is not None:
            width = key.shape[-1]
            both = gather_in_order(torch.cat((key, value), -1), layout.order, group)
            key, value = both[..., :width], both[..., width:]
        dropout = self.dropout if self.training else 0.0
        with self._random(dropout):
            out = attend(
                query, key, value, layout, causal=causal, scale=self.scale, hidden=hidden, dropout=dropout
            )
        return out.flatten(2).squeeze(1) if flat else out.flatten(2)

    def _refuse(self, mask: str, layout: str, qk_head_dim: int, v_head_dim: int) -> None:
        reasons = self.kernel.refusals(
            layout=layout, mask=mask, qk_head_dim=qk_head_dim, v_head_dim=v_head_dim
        )
        if reasons:
            raise UsageError("choose another `attention` for this model:", reasons)

    def _group(self, packed_seq_params: Any) -> dist.ProcessGroup | None:
        """The ranks that share these sequences; None for one rank. Dynamic CP brings its own in the batch."""
        if getattr(packed_seq_params, "cp_group", None) is not None:
            group = packed_seq_params.cp_group
        elif getattr(packed_seq_params, "local_cp_size", None) == 1 or self.config.context_parallel_size == 1:
            return None
        else:
            group = self.cp_group or parallel_state.get_context_parallel_group()
        return group if group.size() > 1 else None

    def _random(self, dropout: float) -> AbstractContextManager[None]:
        """The random state of dropout: heads differ between TP ranks, so that their dropout must too."""
        if dropout == 0.0 or self.config.sequence_parallel:
            return nullcontext()
        fork: AbstractContextManager[None] = tensor_parallel.get_cuda_rng_tracker().fork()
        return fork


def _refuse_unknown(config: Any) -> None:
    wrong = []
    if getattr(config, "window_size", None) is not None:
        wrong.append(f"window_size={config.window_size}: sliding windows")
    if getattr(config, "softmax_type", "vanilla") != "vanilla":
        wrong.append(f"softmax_type={config.softmax_type}: softmax sinks")
    if wrong:
        raise UsageError("the cpu's core attention does not compute", wrong)
