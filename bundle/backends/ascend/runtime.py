"""What the rooms above use of an NPU: megatron's local specs with layers on torch-npu's operators."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from bundle.backends import devices, local
from bundle.backends.ascend import facade, vision
from bundle.backends.ascend.attention import AscendCoreAttention
from bundle.backends.ascend.experts import GroupedExperts
from bundle.backends.ascend.layers import AscendNorm
from bundle.capabilities.ascend import ASCEND
from bundle.environment.ascend import VISIBLE_DEVICES
from bundle.errors import UsageError
from bundle.mcore import gpt
from bundle.recipe import Recipe


class AscendRuntime:
    """Everything that megatron needs to know of an NPU, without MindSpeed."""

    collectives = ASCEND.collectives
    capabilities = ASCEND
    noncausal_packed_attention = staticmethod(vision.attend_packed)
    add_weight_gradient = None

    def select_device(self, local_rank: int) -> torch.device:
        """Return the NPU of this rank, after making it the current one."""
        return devices.select_device(ASCEND.device, local_rank, noun="NPU", visible_variable=VISIBLE_DEVICES)

    def megatron_calls(self) -> AbstractContextManager[None]:
        """Return the context in which megatron is called, which does nothing here."""
        return nullcontext()

    def build_config_options(self, recipe: Recipe) -> dict[str, Any]:
        """Return the TransformerConfig fields for this recipe: the fusions that torch-npu has operators for.

        Raises UsageError for attention and operators that are not here, and for FP8.
        """
        self.refuse_unsupported(recipe)
        return {
            "bias_activation_fusion": ASCEND.uses_operator(recipe, "swiglu"),
            "moe_permute_fusion": ASCEND.uses_operator(recipe, "permute"),
        }

    def refuse_unsupported(self, recipe: Recipe, generation: str | None = None) -> None:
        """Raise UsageError for attention, operators and FP8 that an NPU of this generation lacks."""
        wrong = [
            f"model.attention: {reason}"
            for reason in self.capabilities.list_requested_kernel_refusals(recipe, generation)
        ]
        wrong += [f"model.operators: {reason}" for reason in self.capabilities.list_operator_refusals(recipe)]
        fp8 = recipe.model.fp8
        if fp8 is not None and (
            reason := self.capabilities.explain_fp8_refusal(fp8.scaling, fp8.format, generation)
        ):
            wrong.append(f"model.fp8: {reason}")
        if wrong:
            raise UsageError("backend ascend cannot train this job", wrong)

    def needs_torch_adam_fusion(self, recipe: Recipe) -> bool:
        """Return whether torch's Adam updates by its fused kernel."""
        return ASCEND.uses_operator(recipe, "adamw")

    def build_specs(self, recipe: Recipe, config: TransformerConfig, chunk: int | None) -> gpt.Specs:
        """Return megatron's specs of model chunk `chunk` (None without interleaving), in the NPU's layers.

        Rotation, which is no layer, is chosen here as well.
        """
        unfused = ASCEND.choose_attention(recipe, None).value == "unfused"
        attention = DotProductAttention if unfused else AscendCoreAttention
        norm = AscendNorm if ASCEND.uses_operator(recipe, "rms_norm") else local.LocalNorm
        experts = GroupedExperts if ASCEND.uses_operator(recipe, "grouped_experts") else SequentialMLP
        facade.set_rotary_operator_enabled(ASCEND.uses_operator(recipe, "rotary"))
        layer_specs = gpt.build_softmax_attention_specs(config, chunk, transformer_engine=False)
        both, classes = (layer_specs.decoder, layer_specs.mtp), {SequentialMLP: experts}
        return gpt.Specs(*(local.adapt_spec(spec, classes, attention=attention, norm=norm) for spec in both))
