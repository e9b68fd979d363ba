"""megatron's layer specs with the cpu's classes in them."""

import functools
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from bundle.backends.cpu.runtime.attention import CoreAttention
from bundle.backends.cpu.runtime.fp8.layers import in_fp8
from bundle.backends.cpu.runtime.linear import DuplicatedLinear
from bundle.backends.cpu.runtime.norm import Norm
from bundle.errors import UsageError
from bundle.recipe.model import FP8

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
