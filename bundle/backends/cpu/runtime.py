"""What the rooms above use of a cpu, and megatron's layer specs with the cpu's classes in them."""

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from bundle.backends.cpu.attention import CoreAttention
from bundle.backends.cpu.emulation import megatron_calls
from bundle.backends.cpu.layers import DuplicatedLinear, Norm, in_fp8
from bundle.capabilities.cpu import CPU
from bundle.errors import UsageError
from bundle.mcore import gpt
from bundle.recipe import Recipe
from bundle.recipe.recipe import FP8


class CpuRuntime:
    """Everything that megatron needs to know of a cpu."""

    collectives = CPU.collectives

    def device(self, local_rank: int) -> torch.device:
        """The cpu, for every rank of this machine."""
        return torch.device(CPU.device)

    def megatron(self) -> AbstractContextManager[None]:
        """The context in which megatron is called."""
        return megatron_calls()

    def options(self, recipe: Recipe) -> dict[str, Any]:
        """TransformerConfig fields for this recipe: the attention kernel; fusions stay off, as by default.

        FP8 is not told to megatron, which would look for Transformer Engine's contexts and checkpoints: it is
        in the layers of the specs.
        """
        return {"attention_backend": AttnBackend[CPU.attention(recipe, None).value]}

    def specs(self, recipe: Recipe, config: TransformerConfig, chunk: int | None) -> gpt.Specs:
        """Megatron's specs of model chunk `chunk` (None without interleaving), in the cpu's layers."""
        given, fp8 = gpt.specs(config, chunk, transformer_engine=False), recipe.model.fp8
        return gpt.Specs(adapted(given.decoder, fp8), adapted(given.mtp, fp8))


_CLASSES: dict[type, type] = {
    DotProductAttention: CoreAttention,
    WrappedTorchNorm: Norm,
    FusedLayerNorm: Norm,  # what the specs take where apex is installed
}
_WHOLE = ("linear_q_down_proj", "linear_kv_down_proj")


def adapted(spec: Any, fp8: FP8 | None = None) -> Any:
    """A copy of a layer, block or MTP spec whose attention, norms and down projections run on the cpu.

    With `fp8` its linear layers multiply in FP8: all that Transformer Engine's spec has, the experts' and
    the projection of an MTP layer too. Routers, norms, attention, embedding and output layer do not.

    A spec is a tree of dataclasses (ModuleSpec, submodules), functools.partial, lists, dicts and classes;
    megatron's own objects are left as they are. Raises UsageError for layers that have no cpu form.
    """
    linear = (ColumnParallelLinear, RowParallelLinear, DuplicatedLinear) if fp8 is not None else ()
    return _adapted(spec, _CLASSES | {layer: in_fp8(layer, fp8) for layer in linear})


def _adapted(spec: Any, classes: Mapping[type, type]) -> Any:
    if isinstance(spec, type):
        return _class(spec, classes)
    if isinstance(spec, functools.partial):
        arguments = {name: _adapted(value, classes) for name, value in spec.keywords.items()}
        positional = (_adapted(value, classes) for value in spec.args)
        return functools.partial(_adapted(spec.func, classes), *positional, **arguments)
    if is_dataclass(spec) and not isinstance(spec, type):
        parts = {f.name: _adapted(getattr(spec, f.name), classes) for f in fields(spec) if f.init}
        whole = classes.get(DuplicatedLinear, DuplicatedLinear)
        return replace(spec, **{**parts, **{name: whole for name in _WHOLE if parts.get(name) is not None}})
    if isinstance(spec, (list, tuple)):
        return type(spec)(_adapted(value, classes) for value in spec)
    if isinstance(spec, dict):
        return {name: _adapted(value, classes) for name, value in spec.items()}
    return spec


def _class(given: type, classes: Mapping[type, type]) -> type:
    if given.__module__.startswith("megatron.core.extensions."):
        raise UsageError(
            f"{given.__name__} is a layer of Transformer Engine: on cpu, specs are made without it"
            " (use_transformer_engine=False)"
        )
    if given.__name__.endswith("GroupedMLP"):
        raise UsageError(
            f"{given.__name__} needs grouped GEMM kernels, which a cpu has not: with moe_grouped_gemm=False"
            " the experts run one after the other (SequentialMLP)"
        )
    return classes.get(given, given)
