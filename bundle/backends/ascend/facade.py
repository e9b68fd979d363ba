"""What is replaced beside what torch-npu's transfer_to_npu replaces: in torch first, then in megatron.

For the life of the process, as that is. `REPLACEMENT_REASON_BY_TORCH_NAME` has the reasons.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from bundle.backends.ascend import permutation
from bundle.backends.ascend.operators import find_operator
from bundle.backends.compiling import exempt_megatron_from_compile
from bundle.capabilities.ascend import REPLACEMENT_REASON_BY_TORCH_NAME

_COMPUTE_CAPABILITY = (8, 0)  # the least that bf16 is asked for
_installed: list[str] = []
_is_rotary_enabled = False


def set_rotary_operator_enabled(is_enabled: bool) -> None:
    """Choose whether torch-npu's operator or torch rotates positions from now on: megatron has no switch."""
    global _is_rotary_enabled
    _is_rotary_enabled = is_enabled


def replace_attributes(targets: Collection[str] = tuple(REPLACEMENT_REASON_BY_TORCH_NAME)) -> None:
    """Replace `targets`, attributes that FACADE names; do nothing if some are replaced already.

    Megatron is imported after torch's attributes are replaced, since it binds some of them.
    """
    if _installed:
        return
    _replace(target for target in targets if target.startswith("torch:"))
    from megatron.core.fusions import fused_bias_swiglu  # noqa: F401
    from megatron.core.models.common.embeddings import rope_utils  # noqa: F401
    from megatron.core.transformer.moe import moe_utils  # noqa: F401

    _replace(target for target in targets if target.startswith("megatron."))


def _replace(targets: Iterable[str]) -> None:
    for target in targets:
        module, _, attribute = target.partition(":")
        *path, name = attribute.split(".")
        owner = functools.reduce(getattr, path, sys.modules[module])
        # Without Transformer Engine 0.12 has not even the names of its functions.
        setattr(owner, name, _REPLACEMENT_BUILDERS[target](getattr(owner, name, None)))
        _installed.append(target)


def _replace_capability(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda device=None: _COMPUTE_CAPABILITY


def _replace_swiglu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return SwiGLU by the operator, [.., f] from both halves [.., 2f].

    The operator does not take an empty tensor, such as the rows of an idle expert.
    """

    @functools.wraps(original)
    def swiglu(y: torch.Tensor) -> Any:
        return find_operator("npu_swiglu")(y.contiguous(), -1) if y.numel() else original(y)

    return swiglu


def _replace_swiglu_back(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the gradient of SwiGLU by the operator, [.., 2f].

    The gradient behind a router's weight is float32, and the operator takes one type for both inputs.
    """

    @functools.wraps(original)
    def swiglu_back(g: torch.Tensor, y: torch.Tensor) -> Any:
        if not y.numel():
            return original(g, y)
        wide = torch.promote_types(g.dtype, y.dtype)
        return find_operator("npu_swiglu_backward")(g.to(wide).contiguous(), y.to(wide).contiguous(), -1)

    return swiglu_back


def _replace_rotary(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rotation by the operator: rows [s, b, n, d] rotated by angles [s, 1 or b, 1, r].

    The operator takes r = d alone, and at most 895 values of a head. It takes sines and cosines, so the
    factor of latent attention is applied after it.
    """

    parameters = inspect.signature(original)

    @functools.wraps(original)
    def apply_rotary(*args: Any, **kwargs: Any) -> Any:
        arguments = parameters.bind(*args, **kwargs).arguments
        t, freqs = arguments["t"], arguments["freqs"]
        width = freqs.shape[-1]
        if not _is_rotary_enabled or t.dim() != 4 or not t.numel() or width > _ROTARY_MAX_HEAD_DIM:
            return original(*args, **kwargs)
        rotated_part, rest = t[..., :width], t[..., width:]
        # Channels of latent attention come in pairs; 0.19 has another name for that.
        if arguments.get("mla_rotary_interleaved") or arguments.get("multi_latent_attention"):
            rotated_part = torch.cat((rotated_part[..., ::2], rotated_part[..., 1::2]), -1)
        mode = "interleave" if arguments.get("rotary_interleaved") else "half"
        angles = (freqs.cos().to(t.dtype), freqs.sin().to(t.dtype))
        rotated_part = find_operator("npu_rotary_mul")(rotated_part.contiguous(), *angles, mode)
        if (scale := arguments.get("mscale", 1.0)) != 1.0:
            rotated_part = rotated_part * scale
        return torch.cat((rotated_part, rest), -1) if rest.shape[-1] else rotated_part

    return apply_rotary


def _replace_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return Tensor.type with CUDA's names for an NPU's types, both ways."""

    @functools.wraps(original)
    def type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return original(self).replace("torch.npu.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.npu.", 1)
        return original(self, dtype, *args, **kwargs)

    return type


def _replace_with(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a replacement that ignores the original and is `function` itself."""
    return lambda original: function


_ROTARY_MAX_HEAD_DIM = 895
_SWIGLU_MODULE = "megatron.core.fusions.fused_bias_swiglu"
_ROPE_MODULE = "megatron.core.models.common.embeddings.rope_utils"
_MOE_UTILS_MODULE = "megatron.core.transformer.moe.moe_utils"
_PERMUTATION_REPLACEMENTS = (
    permutation.fused_permute,
    permutation.fused_permute_with_probs,
    permutation.fused_unpermute,
    permutation.fused_sort_chunks_by_index,
    permutation.fused_sort_chunks_by_index_with_probs,
)
_REPLACEMENT_BUILDERS: dict[str, Callable[[Any], Any]] = {
    "torch:compile": lambda original: exempt_megatron_from_compile(original, lambda: True),
    "torch:Tensor.type": _replace_type,
    "torch:cuda.get_device_capability": _replace_capability,
    f"{_SWIGLU_MODULE}:swiglu": _replace_swiglu,
    f"{_SWIGLU_MODULE}:swiglu_back": _replace_swiglu_back,
    f"{_ROPE_MODULE}:_apply_rotary_pos_emb_bshd": _replace_rotary,
    f"{_MOE_UTILS_MODULE}:HAVE_TE": lambda original: True,
    **{
        f"{_MOE_UTILS_MODULE}:{permute_function.__name__}": _replace_with(permute_function)
        for permute_function in _PERMUTATION_REPLACEMENTS
    },
}
