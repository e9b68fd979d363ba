"""megatron's layer specs with the cpu's classes in them."""

import functools
from dataclasses import fields, is_dataclass, replace
from typing import Any

from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from bundle.backends.cpu.runtime.attention import CoreAttention
from bundle.backends.cpu.runtime.linear import DuplicatedLinear
from bundle.backends.cpu.runtime.norm import Norm
from bundle.errors import UsageError

_CLASSES: dict[type, type] = {
    DotProductAttention: CoreAttention,
    WrappedTorchNorm: Norm,
    FusedLayerNorm: Norm,  # what the specs take where apex is installed
}
_WHOLE = ("linear_q_down_proj", "linear_kv_down_proj")


def adapted(spec: Any) -> Any:
    """A copy of a layer, block or MTP spec whose attention, norms and down projections run on the cpu.

    A spec is a tree of dataclasses (ModuleSpec, submodules), functools.partial, lists, dicts and classes;
    megatron's own objects are left as they are. Raises UsageError for layers that have no cpu form.
    """
    if isinstance(spec, type):
        return _class(spec)
    if isinstance(spec, functools.partial):
        arguments = {name: adapted(value) for name, value in spec.keywords.items()}
        return functools.partial(adapted(spec.func), *map(adapted, spec.args), **arguments)
    if is_dataclass(spec) and not isinstance(spec, type):
        parts = {field.name: adapted(getattr(spec, field.name)) for field in fields(spec) if field.init}
        whole = {name: DuplicatedLinear for name in _WHOLE if parts.get(name) is not None}
        return replace(spec, **{**parts, **whole})
    if isinstance(spec, (list, tuple)):
        return type(spec)(map(adapted, spec))
    if isinstance(spec, dict):
        return {name: adapted(value) for name, value in spec.items()}
    return spec


def _class(given: type) -> type:
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
    return _CLASSES.get(given, given)
