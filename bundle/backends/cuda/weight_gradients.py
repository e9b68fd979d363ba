"""The product that adds to a weight's gradient, which megatron's output layer takes from an extension."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from bundle.backends import AddGradient

# Of apex. megatron-core looks for it when it is imported.
EXTENSION_NAME = "fused_weight_gradient_mlp_cuda"


def provide_extension() -> None:
    """Register a module in the place of apex's extension if neither is there.

    Without it, one field of megatron-core's config keeps all layers from adding weight gradients inside
    the product, also those of Transformer Engine. Does nothing if torch has no product of bf16 into fp32.
    """
    if importlib.util.find_spec(EXTENSION_NAME) is not None or not hasattr(torch.ops.aten.addmm, "dtype_out"):
        return
    module = ModuleType(EXTENSION_NAME)
    module.__spec__ = ModuleSpec(EXTENSION_NAME, None)
    vars(module).update(wgrad_gemm_accum_fp32=add_weight_gradient, wgrad_gemm_accum_fp16=add_weight_gradient)
    sys.modules[EXTENSION_NAME] = module


def can_accumulate(device: torch.device) -> bool:
    """Return whether the extension is there and adds a small product without error on `device`."""
    try:
        import fused_weight_gradient_mlp_cuda  # type: ignore[import-not-found]
    except ImportError:
        return False
    ones, total = torch.ones(16, 16, dtype=torch.bfloat16, device=device), torch.ones(16, 16, device=device)
    try:
        fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(ones, ones, total)
    except (AttributeError, RuntimeError):
        return False
    return bool((total == 17).all())


def find_accumulating_product(device: torch.device) -> "AddGradient | None":
    """Return the extension's product that sums in fp32, as `add_weight_gradient`; None without one."""
    if not can_accumulate(device):
        return None
    import fused_weight_gradient_mlp_cuda

    product: AddGradient = fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32
    return product


def add_weight_gradient(inputs: torch.Tensor, gradients: torch.Tensor, total: torch.Tensor) -> None:
    """Add `gradients`ᵀ `inputs` to `total` in place, in one product that sums in fp32.

    Shapes: inputs [tokens, in], gradients of the outputs [tokens, out], total [out, in].
    """
    if inputs.dtype == total.dtype:
        torch.addmm(total, gradients.t(), inputs, out=total)
    else:
        torch.ops.aten.addmm.dtype_out(total, gradients.t(), inputs, total.dtype, out=total)
