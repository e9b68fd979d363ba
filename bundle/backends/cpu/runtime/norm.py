"""Layer norms that may be used with sequence parallelism, which megatron's torch norms refuse."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bundle.errors import UsageError


class Norm(torch.nn.Module):
    """RMSNorm or LayerNorm, as `config.normalization` says, over the last dimension.

    Its weights say whether they see only this rank's part of the sequence (`sequence_parallel`): then
    finalize_model_grads sums their gradients over the tensor parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        if config.layernorm_zero_centered_gamma or config.normalization not in ("RMSNorm", "LayerNorm"):
            raise UsageError(
                f"the cpu has no norm {config.normalization} with zero_centered_gamma="
                f"{config.layernorm_zero_centered_gamma}: it has RMSNorm and LayerNorm with plain weights"
            )
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.register_parameter("bias", None)
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as `x`."""
        shape = self.weight.shape
        if self.bias is None:
            return F.rms_norm(x, shape, self.weight, self.eps)
        return F.layer_norm(x, shape, self.weight, self.bias, self.eps)
