"""What the rooms above use of an NVIDIA GPU, and what is told to megatron because of it, with the reasons."""

from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import distributions
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.enums import Fp8Recipe
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from bundle.backends import devices
from bundle.backends.cuda import vision
from bundle.backends.cuda.weight_gradients import can_accumulate, find_accumulating_product
from bundle.capabilities.cuda import CUDA
from bundle.environment.nvidia import VISIBLE_DEVICES
from bundle.errors import EnvironmentUnfit, UsageError
from bundle.mcore import can_take_keyword, gpt
from bundle.recipe import Recipe
from bundle.recipe.recipe import FP8

if TYPE_CHECKING:
    from bundle.backends import AddGradient


class CudaRuntime:
    """Everything that megatron needs to know of an NVIDIA GPU."""

    collectives = CUDA.collectives
    noncausal_packed_attention = staticmethod(vision.attend_packed)

    @property
    def add_weight_gradient(self) -> "AddGradient | None":
        """The product of the extension that megatron's output layer takes; None without it."""
        return find_accumulating_product(torch.device(CUDA.device))

    def select_device(self, local_rank: int) -> torch.device:
        """Return the GPU of this rank, after making it the current one."""
        return devices.select_device(CUDA.device, local_rank, noun="GPU", visible_variable=VISIBLE_DEVICES)

    def megatron_calls(self) -> AbstractContextManager[None]:
        """Return the context in which megatron is called, which does nothing here."""
        return nullcontext()

    def build_config_options(self, recipe: Recipe) -> dict[str, Any]:
        """Return the TransformerConfig fields for this recipe: attention, grouped GEMM, fusions, FP8."""
        major, minor = torch.cuda.get_device_capability()
        return build_config_options(recipe, generation=f"{major}.{minor}")

    def needs_torch_adam_fusion(self, recipe: Recipe) -> bool:
        """Return False: megatron takes Transformer Engine's FusedAdam, and not torch's."""
        return False

    def build_specs(self, recipe: Recipe, config: TransformerConfig, chunk: int | None) -> gpt.Specs:
        """Return Transformer Engine's specs of model chunk `chunk` (None without interleaving)."""
        return gpt.build_softmax_attention_specs(config, chunk, transformer_engine=True)


def build_config_options(recipe: Recipe, *, generation: str) -> dict[str, Any]:
    """Return the fields for `recipe` on a GPU of compute capability `generation`.

    Raises UsageError for FP8 that this GPU lacks, EnvironmentUnfit for kernels that are not installed. SwiGLU
    and the loss are one kernel each, and keep less for the backward pass. The loss is megatron's own kernel,
    since newer releases warn of the stability of Transformer Engine's. Megatron's kernel returns its gradient
    in bf16 for any logits (first gradient of an fp32 model: 6e-4 off), so that fp32 models do not use it.
    """
    fields: dict[str, Any] = {
        "attention_backend": _select_attention_backend(recipe, generation),
        "apply_rope_fusion": _can_fuse_rope(recipe),
        # Both kernels keep less for the backward pass; the loss gives its gradient in bf16 alone, and
        # Megatron-LM refuses it in its deterministic mode.
        "bias_activation_fusion": True,
        "cross_entropy_loss_fusion": recipe.model.dtype == "bf16" and not recipe.train.deterministic,
        # Transformer Engine's layers always can, but one field decides for all layers.
        "gradient_accumulation_fusion": can_accumulate(torch.device(CUDA.device)),
    }
    if recipe.architecture.moe is not None:
        # All experts of a rank in one GroupedLinear (TEGroupedMLP), and the sorting of tokens in one kernel.
        fields |= {"moe_grouped_gemm": True, "moe_permute_fusion": True}
    if recipe.model.fp8 is not None:
        fields |= _build_fp8_options(recipe.model.fp8, generation)
    return fields


def _select_attention_backend(recipe: Recipe, generation: str) -> AttnBackend:
    """Return megatron's name of the planned kernel.

    Where several take the job, that is `auto`, and Transformer Engine chooses call by call: megatron would
    switch all others off for a name, and what the named one then does not take would fail instead of going to
    the next. What is refused here would end in "No dot product attention backend is available" at the first
    layer.
    """
    if refusals := CUDA.list_requested_kernel_refusals(recipe, generation):
        raise UsageError("model.attention: no kernel supports this job", refusals)
    name = CUDA.choose_attention(recipe, generation).value
    flash = (
        distribution
        for package in ("flash-attn", "flash-attn-3")
        for distribution in distributions(name=package)
    )
    if name == "flash" and not any(flash):
        raise EnvironmentUnfit(
            "model.attention: flash needs flash-attn, which is not installed. Install it, or set auto or"
            " fused"
        )
    return AttnBackend[name]


def _can_fuse_rope(recipe: Recipe) -> bool:
    """Return whether rotary positions are one kernel.

    Latent attention has such a kernel only for the class of embedding that megatron calls yarn. We use that
    class with any frequencies, also plain ones (`mcore.rotary`). The kernel supports context parallelism from
    0.14, and head widths that are powers of two, as Triton's ranges are.
    """
    mla = recipe.architecture.mla
    if mla is None:
        return True
    if any(width & (width - 1) for width in (mla.qk_head_dim, mla.v_head_dim, mla.qk_pos_emb_head_dim)):
        return False
    try:
        from megatron.core.fusions.fused_mla_yarn_rope_apply import fused_apply_mla_rope_for_q
    except ImportError:  # 0.12
        return False
    return can_take_keyword(fused_apply_mla_rope_for_q, "cp_rank")


def _build_fp8_options(fp8: FP8, generation: str) -> dict[str, Any]:
    """Return the fields for FP8 products in Transformer Engine's layers.

    The output layer, router and attention stay in bf16.

    Experts need no padding of the router's (moe_router_padding_for_fp8): the grouped layer pads each expert's
    rows by itself. Weights stay in bf16 and are cast at the first micro-batch of each step
    (`set_is_first_microbatch`, which megatron's schedules call).
    """
    refusal = CUDA.explain_fp8_refusal(fp8.scaling, fp8.format, generation)
    if refusal is not None:
        raise UsageError(f"model.fp8: {refusal}")
    if fp8.scaling not in Fp8Recipe.__members__:
        raise EnvironmentUnfit(
            f"model.fp8.scaling: this megatron-core does not support {fp8.scaling}, only"
            f" {', '.join(Fp8Recipe.__members__)}. Choose one of these, or install a newer megatron-core"
        )
    fields: dict[str, Any] = {"fp8": fp8.format, "fp8_recipe": fp8.scaling}
    if fp8.scaling == "delayed":
        # Transformer Engine's own defaults. Megatron's scale by the last step alone.
        fields |= {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
    return fields
