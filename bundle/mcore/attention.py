"""Megatron's attention layers, each built by itself: with sinks, from one sequence to another, linear."""

import copy
import inspect

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import CrossAttention, CrossAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from bundle.mcore.signatures import known

_HEADS, _WIDTH = 4, 16  # of the gated delta net


def with_sinks(config: TransformerConfig) -> torch.nn.Module:
    """The unfused attention of a layer, with the heads of this rank and a learned sink for each."""
    config = copy.copy(config)
    config.softmax_type = "learnable"
    made: torch.nn.Module = DotProductAttention(config, 1, AttnMaskType.causal, "self")
    return made


def cross_attention(
    config: TransformerConfig, tp: dist.ProcessGroup, cp: dist.ProcessGroup
) -> torch.nn.Module:
    """A layer whose heads are shared out over `tp`, whatever the layout's own groups are (since 0.13)."""
    from megatron.core import process_groups_config

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


def gated_delta_net(config: TransformerConfig) -> torch.nn.Module:
    """The linear attention of Qwen3-Next and Qwen3.5, by torch alone (since 0.16): [s, b, h] -> [s, b, h].

    With this rank's part of the heads. Megatron refuses to build it without flash-linear-attention, of which
    this computation has no need.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules

    config = copy.copy(config)
    config.deterministic_mode = True
    config.sequence_parallel = config.persist_layer_norm = False
    config.linear_conv_kernel_dim = 4
    config.linear_key_head_dim = config.linear_value_head_dim = _WIDTH
    config.linear_num_key_heads = config.linear_num_value_heads = _HEADS
    inspect.unwrap(GatedDeltaNet.__init__).__globals__["HAVE_FLA"] = True
    made: torch.nn.Module = GatedDeltaNet(
        config,
        GatedDeltaNetSubmodules(ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear),
        layer_number=1,
        use_qk_l2norm=False,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    return made
