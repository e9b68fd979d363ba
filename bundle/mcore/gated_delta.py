"""Megatron's own gated delta net, the linear attention of Qwen3-Next and Qwen3.5 (since 0.16)."""

import copy
import inspect

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

_HEADS, _WIDTH = 4, 16


def gated_delta_net(config: TransformerConfig) -> torch.nn.Module:
    """A layer with this rank's part of the heads, computed by torch alone: [s, b, h] -> [s, b, h].

    Megatron refuses to build it without flash-linear-attention, of which this computation has no need.
    """
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
