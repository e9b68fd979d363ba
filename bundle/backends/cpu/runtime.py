"""What the rooms above use of a cpu, and megatron's layer specs with the cpu's classes in them."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from bundle.backends import local
from bundle.backends.cpu.attention import CpuCoreAttention
from bundle.backends.cpu.emulation import megatron_calls
from bundle.backends.cpu.layers import make_fp8_layer
from bundle.backends.local import DuplicatedLinear, LocalNorm
from bundle.capabilities.cpu import CPU
from bundle.mcore import gpt
from bundle.recipe import Recipe
from bundle.recipe.recipe import FP8


class CpuRuntime:
    """Everything that megatron needs to know of a cpu."""

    collectives = CPU.collectives
    noncausal_packed_attention = None
    add_weight_gradient = None

    def select_device(self, local_rank: int) -> torch.device:
        """Return the cpu, for every rank of this machine."""
        return torch.device(CPU.device)

    def megatron_calls(self) -> AbstractContextManager[None]:
        """Return the context in which megatron is called."""
        return megatron_calls()

    def build_config_options(self, recipe: Recipe) -> dict[str, Any]:
        """Return the TransformerConfig fields: the attention kernel; fusions stay off, as by default.

        Megatron is not told about FP8: it would look for Transformer Engine's contexts and checkpoints. The
        layers of the specs have FP8 instead.
        """
        return {"attention_backend": AttnBackend[CPU.choose_attention(recipe, None).value]}

    def needs_torch_adam_fusion(self, recipe: Recipe) -> bool:
        """Return False: the cpu has one order of operations, whatever other backends fuse."""
        return False

    def build_specs(self, recipe: Recipe, config: TransformerConfig, chunk: int | None) -> gpt.Specs:
        """Return megatron's specs of model chunk `chunk` (None without interleaving), in the cpu's layers."""
        layer_specs = gpt.build_softmax_attention_specs(config, chunk, transformer_engine=False)
        return gpt.Specs(
            *(adapt_spec(spec, recipe.model.fp8) for spec in (layer_specs.decoder, layer_specs.mtp))
        )


def adapt_spec(spec: Any, fp8: FP8 | None = None) -> Any:
    """Return `local.adapt_spec` with the cpu's attention; with `fp8` its linear layers multiply in FP8.

    That is all that Transformer Engine's spec has, the experts' and the projection of an MTP layer too.
    Routers, norms, attention, embedding and output layer do not.
    """
    linear = (ColumnParallelLinear, RowParallelLinear, DuplicatedLinear) if fp8 is not None else ()
    classes = {layer: make_fp8_layer(layer, fp8) for layer in linear}
    return local.adapt_spec(spec, classes, attention=CpuCoreAttention, norm=LocalNorm)
