"""The one call of npu_fusion_attention."""

import torch
from torch import Tensor

from bundle.backends.ascend.runtime.inputs import KernelInputs
from bundle.errors import EnvironmentUnfit


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inputs: KernelInputs,
    *,
    heads: int,
    scale: float,
    dropout: float,
) -> Tensor:
    """Softmax attention of `heads` query heads; the result is laid out like `query`, as wide as the values.

    [t, n, d] where `inputs` has ends of sequences (TND), else [s, b, n * d] (SBH): megatron's own order of
    dimensions, so nothing is copied. Raises EnvironmentUnfit where torch-npu is not loaded.
    """
    operator = getattr(torch.ops.npu, "npu_fusion_attention", None)
    if operator is None:
        raise EnvironmentUnfit(
            "torch has no operator npu::npu_fusion_attention: install the torch-npu that fits this torch and"
            " CANN, and import it before the model is built"
        )
    layout = "SBH" if inputs.actual_seq_qlen is None else "TND"
    result = operator(
        query, key, value, heads, layout, scale=scale, keep_prob=1.0 - dropout, **inputs.keywords()
    )
    out: Tensor = result[0]
    return out
