"""The references under torch-npu's own declarations: its schemas and its autograd stay in force."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.backends.ascend.contract import npu_fusion_attention
from tests.npu.emulation import experts, operators
from tests.npu.emulation.aten import called
from tests.npu.emulation.memory import NPU, alias, differentiable, on_cpu, on_npu, to_npu

_library = torch.library.Library("npu", "IMPL")


def install() -> None:
    """Puts them where torch-npu has its kernels."""
    kernels = {
        function.__name__: _through(function) for function in (*operators.OPERATORS, *experts.OPERATORS)
    } | {
        "npu_fusion_attention": _through(npu_fusion_attention),
        "npu_fusion_attention_grad": _attention_grad,
        "_npu_dtype_cast": _cast,
        "_npu_dtype_cast_backward": _cast,
    }
    for name, kernel in kernels.items():
        _library.impl(name, kernel, "PrivateUse1", allow_override=True)


def _through(function: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        called[function.__name__] += 1
        device = next((x.device for x in tree_leaves((args, kwargs)) if on_npu(x)), NPU)
        with torch.no_grad():
            found = function(*tree_map(on_cpu, args), **tree_map(on_cpu, kwargs))
        return tree_map(lambda x: to_npu(x.contiguous() if isinstance(x, Tensor) else x, device), found)

    return kernel


def _attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    **options: Any,
) -> tuple[Tensor, ...]:
    """The gradients of query, key and value, of the documented operator with the same options."""
    called["npu_fusion_attention_grad"] += 1
    known = ("pse", "padding_mask", "atten_mask", "pre_tockens", "next_tockens", "inner_precise", "prefix",
             "actual_seq_qlen", "actual_seq_kvlen", "sparse_mode", "softmax_layout")  # fmt: skip
    given: dict[str, Any] = {name: on_cpu(options[name]) for name in known if name in options}
    given |= {"scale": scale_value, "keep_prob": keep_prob}
    with differentiable():
        inputs = [alias(x).detach().clone().requires_grad_() for x in (query, key, value)]
        out = npu_fusion_attention(inputs[0], inputs[1], inputs[2], head_num, input_layout, **given)[0]
        gradients = torch.autograd.grad(out, inputs, alias(dy))
    nothing = torch.empty(0, device=query.device)
    return (*(to_npu(x.contiguous(), query.device) for x in gradients), nothing, nothing)


def _cast(x: Tensor, dtype: torch.dtype, *_: Any) -> Tensor:
    made = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=x.device)
    if x.numel():
        alias(made).copy_(alias(x))
    return made
