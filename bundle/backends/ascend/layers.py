"""Layers on torch-npu's operators."""

from torch import Tensor

from bundle.backends import local
from bundle.backends.ascend.operators import find_operator


class AscendNorm(local.LocalNorm):
    """RMSNorm on npu_rms_norm: gamma in the input's type or float32; LayerNorm is torch's own."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed `x`, in its shape and dtype."""
        if self.bias is not None:
            return super().forward(x)
        out: Tensor = find_operator("npu_rms_norm")(x, self.weight, self.eps)[0]
        return out
