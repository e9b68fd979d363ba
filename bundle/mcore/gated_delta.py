"""Gated delta nets, the linear attention of Qwen3-Next and Qwen3.5, in megatron-core's layers (since 0.16).

Megatron builds its own specs of them with Transformer Engine alone. Here a layer's attention gives its
projections and its norm to a net that takes its place. Therefore every backend builds it from its own layers.
"""

import copy
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from bundle.architectures import DeltaNet
from bundle.mcore import filter_keywords

_L2_NORM_EPSILON = 1e-6  # of flash-linear-attention's l2norm


def build_config_fields(net: DeltaNet) -> dict[str, Any]:
    """Return the fields of a TransformerConfig that describe the nets."""
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": list(net.layers),
        "linear_conv_kernel_dim": net.convolution,
        "linear_key_head_dim": net.key_head_dim,
        "linear_value_head_dim": net.value_head_dim,
        "linear_num_key_heads": net.num_key_heads,
        "linear_num_value_heads": net.num_value_heads,
    }


def read_delta_net(chunk: Any) -> DeltaNet | None:
    """Return the nets of a model chunk, as its config describes them; None where it has none."""
    config = getattr(chunk, "config", None)
    if config is None or getattr(config, "experimental_attention_variant", None) is None:
        return None
    return DeltaNet(
        num_key_heads=config.linear_num_key_heads,
        num_value_heads=config.linear_num_value_heads,
        key_head_dim=config.linear_key_head_dim,
        value_head_dim=config.linear_value_head_dim,
        convolution=config.linear_conv_kernel_dim,
        layers=tuple(config.linear_attention_freq),
    )


def with_attention_only(config: TransformerConfig) -> TransformerConfig:
    """Return the config with attention alone: releases from 0.19 on make specs for no other."""
    if getattr(config, "experimental_attention_variant", None) is not None:
        config = copy.copy(config)
        config.experimental_attention_variant = None
    return config


def replace_attention(block: Any, net: DeltaNet, config: TransformerConfig, chunk: int | None) -> Any:
    """Return the block spec of model chunk `chunk` with its nets in place of attention.

    `chunk` is None without interleaving.
    """
    first = get_transformer_layer_offset(
        config, **filter_keywords(get_transformer_layer_offset, vp_stage=chunk)
    )
    layers = [
        _with_net(layer) if net.layers[number] else layer
        for number, layer in enumerate(block.layer_specs, start=first)
    ]
    return replace(block, layer_specs=layers)


def _with_net(layer: ModuleSpec) -> ModuleSpec:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules

    submodules = layer.submodules
    attention = submodules.self_attention.submodules
    parts = GatedDeltaNetSubmodules(
        attention.linear_qkv, _disable_zero_centered_gamma(attention.q_layernorm), attention.linear_proj
    )
    # In checkpoints the norm before the net is its projection's, as Transformer Engine has it.
    keys = {
        name: key.replace("linear_qkv", "in_proj")
        for name, key in submodules.sharded_state_dict_keys_map.items()
    }
    net = ModuleSpec(module=_choose_fla_or_torch_class(), submodules=parts)
    return replace(
        layer, submodules=replace(submodules, self_attention=net, sharded_state_dict_keys_map=keys)
    )


def _disable_zero_centered_gamma(norm: type) -> type:
    """Return the same norm, which multiplies by its weights whatever the model's norms do."""

    def build_norm(_: type, config: TransformerConfig, hidden_size: int, eps: float) -> torch.nn.Module:
        config = copy.copy(config)
        config.layernorm_zero_centered_gamma = False
        built: torch.nn.Module = norm(config=config, hidden_size=hidden_size, eps=eps)
        return built

    return type(f"Plain{norm.__name__}", (), {"__new__": build_norm})


@cache
def _choose_fla_or_torch_class() -> Any:
    """Return megatron's class; on the cpu and without flash-linear-attention a subclass on torch alone.

    Megatron computes that where it is asked to be deterministic. It refuses to be built without those
    kernels, which need a GPU; the computation needs only a norm of them.
    """
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    module_names = {kind.__module__ for kind in GatedDeltaNet.__mro__}
    (namespace,) = (
        candidate for name in module_names if "HAVE_FLA" in (candidate := vars(sys.modules[name]))
    )
    has_fla = namespace["HAVE_FLA"]
    if has_fla and torch.empty(0, device=torch.cuda.current_device()).is_cuda:
        return GatedDeltaNet

    class TorchGatedDeltaNet(GatedDeltaNet):  # type: ignore[misc]
        """A gated delta net that torch alone computes, deterministically."""

        def __init__(self, config: TransformerConfig, *parts: Any, **more: Any) -> None:
            config = copy.copy(config)
            config.deterministic_mode = True
            namespace.update(HAVE_FLA=True, l2norm=_normalize_l2)
            try:
                super().__init__(config, *parts, **more)
            finally:
                namespace["HAVE_FLA"] = has_fla

    return TorchGatedDeltaNet


def _normalize_l2(x: Tensor) -> Tensor:
    """Return `x` over the root of the sum of its squares along the last dimension, summed in fp32."""
    values = x.float()
    return (values * (values.square().sum(-1, keepdim=True) + _L2_NORM_EPSILON).rsqrt()).to(x.dtype)


def build_small_delta_net(config: TransformerConfig) -> torch.nn.Module:
    """Return a net of four heads by itself; this rank has its part: [s, b, h] -> [s, b, h]."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules

    config = copy.copy(config)
    config.sequence_parallel = config.persist_layer_norm = False
    for name, value in build_config_fields(DeltaNet(4, 4, 16, 16, 4, ())).items():
        setattr(config, name, value)
    net: torch.nn.Module = _choose_fla_or_torch_class()(
        config,
        GatedDeltaNetSubmodules(ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear),
        layer_number=1,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    return net
