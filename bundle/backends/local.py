"""Megatron's layer specs without Transformer Engine: the walk that changes their classes, and two layers.

Both are made on the device that torch.cuda names current: the cpu under its facade, an NPU under torch-npu's.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from bundle.errors import UsageError


class LocalNorm(torch.nn.Module):
    """RMSNorm or LayerNorm, as `config.normalization` says, over the last dimension.

    With zero-centred weights (`config.layernorm_zero_centered_gamma`) RMSNorm multiplies by one more.
    Its weights say whether they see only this rank's part of the sequence (`sequence_parallel`): then
    finalize_model_grads sums their gradients over the tensor parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        if config.normalization not in ("RMSNorm", *(() if self.is_zero_centered else ("LayerNorm",))):
            raise UsageError(
                f"{config.normalization} with zero_centered_gamma={self.is_zero_centered} is not supported"
                " without Transformer Engine. Use RMSNorm, or LayerNorm with zero_centered_gamma=False"
            )
        self.eps = eps
        factory_options = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = torch.nn.Parameter(
            torch.full((hidden_size,), float(not self.is_zero_centered), **factory_options)
        )
        self.register_parameter("bias", None)
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, **factory_options))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed `x`, in its shape and dtype."""
        shape = self.weight.shape
        if self.is_zero_centered:
            return F.rms_norm(x.float(), shape, 1 + self.weight.float(), self.eps).to(x.dtype)
        if self.bias is None:
            return F.rms_norm(x, shape, self.weight, self.eps)
        return F.layer_norm(x, shape, self.weight, self.bias, self.eps)


class DuplicatedLinear(torch.nn.Module):
    """What TELinear is with parallel_mode="duplicated": the down projections of latent attention.

    Megatron's own specs without Transformer Engine split them by columns, and the gather behind drops the
    other ranks' part of the gradient of the rotary key.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool = False,
        **layout: Any,  # how the weight would be split and communicated: it is not
    ) -> None:
        super().__init__()
        if bias:
            raise UsageError("the duplicated linear layer has no bias")
        factory_options = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, **factory_options))
        self.weight.sequence_parallel = config.sequence_parallel
        if config.perform_initialization:
            name = tensor_parallel.random.get_data_parallel_rng_tracker_name()
            with tensor_parallel.get_cuda_rng_tracker().fork(name):
                init_method(self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return [..., output_size], and None: there is no bias to add later."""
        return self._forward_impl(input=x, weight=self.weight), None

    def _forward_impl(self, input: Tensor, weight: Tensor) -> Tensor:
        """Return the product, under the name that megatron's other linear layers have for it."""
        return F.linear(input, weight)

    def get_extra_state(self) -> None:
        """Return None: megatron's linear layers reserve this key of checkpoints for FP8."""

    def set_extra_state(self, state: Any) -> None:
        """Ignore the state that a layer with FP8 has saved."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the whole weight, replicated over the tensor parallel ranks."""
        state = self.state_dict(prefix="", keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets)
        return sharded


CLASS_BY_MLA_DOWN_PROJECTION: Mapping[str, type] = dict.fromkeys(
    ("linear_q_down_proj", "linear_kv_down_proj"), DuplicatedLinear
)
"""What specs without Transformer Engine would split, by its name in them."""


def adapt_spec(spec: Any, classes: Mapping[type, type], *, attention: type, norm: type) -> Any:
    """Return a copy of a layer, block or MTP spec with this core attention and these norms.

    Down projections are whole on every rank. `classes` maps further layers to their replacements,
    DuplicatedLinear too. Raises what `replace_classes` raises.
    """
    norms = {WrappedTorchNorm: norm, FusedLayerNorm: norm}  # the second is taken where apex is installed
    duplicated = {name: classes.get(layer, layer) for name, layer in CLASS_BY_MLA_DOWN_PROJECTION.items()}
    return replace_classes(spec, {DotProductAttention: attention, **norms, **classes}, duplicated)


def replace_classes(
    spec: Any, classes: Mapping[type, type], classes_by_name: Mapping[str, type] = MappingProxyType({})
) -> Any:
    """Return a copy of a spec with other classes; `classes_by_name` are those of submodules.

    A spec is a tree of dataclasses (ModuleSpec, submodules), functools.partial, lists, dicts and classes;
    megatron's own objects are left as they are. Raises UsageError for layers that have no class without
    Transformer Engine.
    """
    if isinstance(spec, type):
        return _get_replacement_or_same_class(spec, classes)
    if isinstance(spec, functools.partial):
        arguments = {
            name: replace_classes(value, classes, classes_by_name) for name, value in spec.keywords.items()
        }
        positional = (replace_classes(value, classes, classes_by_name) for value in spec.args)
        return functools.partial(
            replace_classes(spec.func, classes, classes_by_name), *positional, **arguments
        )
    if is_dataclass(spec) and not isinstance(spec, type):
        parts = {
            f.name: replace_classes(getattr(spec, f.name), classes, classes_by_name)
            for f in fields(spec)
            if f.init
        }
        return replace(
            spec,
            **{
                **parts,
                **{
                    name: replacement
                    for name, replacement in classes_by_name.items()
                    if parts.get(name) is not None
                },
            },
        )
    if isinstance(spec, (list, tuple)):
        return type(spec)(replace_classes(value, classes, classes_by_name) for value in spec)
    if isinstance(spec, dict):
        return {name: replace_classes(value, classes, classes_by_name) for name, value in spec.items()}
    return spec


def _get_replacement_or_same_class(layer: type, classes: Mapping[type, type]) -> type:
    if layer in classes:
        return classes[layer]
    if layer.__module__.startswith("megatron.core.extensions."):
        raise UsageError(
            f"{layer.__name__} is a layer of Transformer Engine, but these specs are built without it"
            " (use_transformer_engine=False)"
        )
    if layer.__name__.endswith("GroupedMLP"):
        raise UsageError(
            f"{layer.__name__} needs grouped GEMM kernels, which this backend does not have. Set"
            " moe_grouped_gemm=False to run the experts one after the other (SequentialMLP)"
        )
    return layer
