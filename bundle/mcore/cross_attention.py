"""Megatron's own attention from one sequence to another, over ranks that are named (since 0.13)."""

import torch
import torch.distributed as dist
from megatron.core import process_groups_config
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import CrossAttention, CrossAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from bundle.mcore.signatures import known


def cross_attention(
    config: TransformerConfig, tp: dist.ProcessGroup, cp: dist.ProcessGroup
) -> torch.nn.Module:
    """A layer whose heads are shared out over `tp`, whatever the layout's own groups are."""
    kinds = ("ProcessGroupCollection", "ModelCommProcessGroups")  # the latter to 0.14
    kind = next(kind for kind in kinds if hasattr(process_groups_config, kind))
    groups = getattr(process_groups_config, kind)()
    groups.tp, groups.cp = tp, cp
    parts = CrossAttentionSubmodules(
        ColumnParallelLinear, ColumnParallelLinear, DotProductAttention, RowParallelLinear
    )
    told = known(CrossAttention.__init__, pg_collection=groups, model_comm_pgs=groups)
    made: torch.nn.Module = CrossAttention(config, parts, 1, **told)
    return made
