"""What the rooms above use of an NPU where MindSpeed's layers have the names of Transformer Engine's."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.optimizer import Adam
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from bundle.backends import local
from bundle.backends.ascend import facade
from bundle.backends.ascend.attention import AscendCoreAttention
from bundle.backends.ascend.layers import AscendNorm
from bundle.backends.ascend.runtime import AscendRuntime
from bundle.capabilities.ascend import ASCEND_WITH_MINDSPEED
from bundle.environment.ascend import parse_generation
from bundle.mcore import gpt
from bundle.recipe import Recipe


class SettableEpsilonNormedLinear(transformer_engine.TELayerNormColumnParallelLinear):  # type: ignore[misc]
    """MindSpeed's norm with the projection behind it, and an epsilon that is its own."""

    config: Any

    @property
    def eps(self) -> float:
        """The number that is added to the mean square."""
        return float(self.config.layernorm_epsilon)

    @eps.setter
    def eps(self, value: float) -> None:
        self.config = copy.copy(self.config)
        self.config.layernorm_epsilon = value


def _clear_duplicated_tensor_parallel_flag(original: Callable[..., None]) -> Callable[..., None]:
    """Return TELinear's `__init__` that marks no whole weight as one rank's share.

    MindSpeed marks all of them, as Transformer Engine did: the norm of gradients then counts the down
    projections of latent attention on every tensor-parallel rank, and clipping is too strong.
    """

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, parallel_mode: str | None, **kwargs: Any) -> None:
        original(self, *args, parallel_mode=parallel_mode, **kwargs)
        if parallel_mode == "duplicated":
            self.weight.tensor_model_parallel = False

    return __init__


def _store_adam_steps_as_int(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return AdamW's `step` whose groups hold their count as a number between steps, as checkpoints do.

    MindSpeed counts in a tensor of the device for each group. Megatron takes equal counts for several ones,
    and refuses to save.
    """

    @functools.wraps(original)
    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        counts = [group.pop("step", 0) for group in self.param_groups]
        for group, count in zip(self.param_groups, counts, strict=True):
            if count:
                group["step"] = torch.full((), count, dtype=torch.int64, device=torch.cuda.current_device())
        loss = original(self, closure)
        for group, count in zip(self.param_groups, counts, strict=True):
            group["step"] = count + 1
        return loss

    return step


Adam.step = _store_adam_steps_as_int(Adam.step)
transformer_engine.TELinear.__init__ = _clear_duplicated_tensor_parallel_flag(
    transformer_engine.TELinear.__init__
)
# To 0.13 the down projections of latent attention are cut, and gathered in a way that drops gradients.
_MLA_DOWN_CLASSES_BY_SUBMODULE = (
    {} if hasattr(multi_latent_attention, "TELinear") else local.CLASS_BY_MLA_DOWN_PROJECTION
)
# Left as they are: experts on MindSpeed's linear layers; and what specs name, and megatron builds only where
# use_te_activation_func says so (from 0.15).
_LAYERS_LEFT_TO_MINDSPEED = (
    TEGroupedMLP,
    *filter(None, [getattr(transformer_engine, "TEActivationOp", None)]),
)


class MindSpeedRuntime(AscendRuntime):
    """An NPU through MindSpeed: linear layers, experts and AdamW are its own, attention and norms ours."""

    capabilities = ASCEND_WITH_MINDSPEED

    def build_config_options(self, recipe: Recipe) -> dict[str, Any]:
        """Return the TransformerConfig fields for this recipe.

        Raises UsageError for attention and operators that MindSpeed lacks, and for FP8 that this NPU lacks.
        """
        self.refuse_unsupported(recipe, parse_generation(torch.npu.get_device_name()))
        fields: dict[str, Any] = {
            "bias_activation_fusion": ASCEND_WITH_MINDSPEED.uses_operator(recipe, "swiglu")
        }
        if recipe.architecture.moe is not None:
            permute = ASCEND_WITH_MINDSPEED.uses_operator(recipe, "permute")
            fields |= {"moe_grouped_gemm": True, "moe_permute_fusion": permute}
        if (fp8 := recipe.model.fp8) is not None:
            fields |= {"fp8": fp8.format, "fp8_recipe": fp8.scaling}
        return fields

    def needs_torch_adam_fusion(self, recipe: Recipe) -> bool:
        """Return False: megatron takes MindSpeed's Adam, under apex's name, and not torch's."""
        return False

    def build_specs(self, recipe: Recipe, config: TransformerConfig, chunk: int | None) -> gpt.Specs:
        """Return megatron's specs of model chunk `chunk`, with Transformer Engine's names.

        Norms are ours, since MindSpeed's are made in float32 whatever the model's type is.
        """
        unfused = ASCEND_WITH_MINDSPEED.choose_attention(recipe, None).value == "unfused"
        facade.set_rotary_operator_enabled(ASCEND_WITH_MINDSPEED.uses_operator(recipe, "rotary"))
        layer_specs = gpt.build_softmax_attention_specs(config, chunk, transformer_engine=True)
        classes = {
            transformer_engine.TEDotProductAttention: DotProductAttention if unfused else AscendCoreAttention,
            transformer_engine.TELayerNormColumnParallelLinear: SettableEpsilonNormedLinear,
            transformer_engine.TENorm: AscendNorm,
            **{layer: layer for layer in _LAYERS_LEFT_TO_MINDSPEED},
        }
        return gpt.Specs(
            *(
                local.replace_classes(spec, classes, _MLA_DOWN_CLASSES_BY_SUBMODULE)
                for spec in (layer_specs.decoder, layer_specs.mtp)
            )
        )
