"""What an accelerator can, as data with reasons: layers, attention kernels, FP8, masks, environment.

Everything that may be known about a backend without torch; `backends` holds what needs it.
"""

from bundle.capabilities.ascend import ASCEND
from bundle.capabilities.capabilities import (
    AttentionKernel,
    Capabilities,
    Choice,
    LayerTraits,
    Mask,
    Peak,
    Variable,
)
from bundle.capabilities.cpu import CPU, LOCAL
from bundle.capabilities.cuda import CUDA, TRANSFORMER_ENGINE

__all__ = [
    "ASCEND",
    "CPU",
    "CUDA",
    "LOCAL",
    "TRANSFORMER_ENGINE",
    "AttentionKernel",
    "Capabilities",
    "Choice",
    "LayerTraits",
    "Mask",
    "Peak",
    "Variable",
    "of",
]

_BACKENDS = {can.backend: can for can in (CPU, CUDA, ASCEND)}


def of(backend: str) -> Capabilities:
    """What a backend (cpu, cuda, ascend) offers."""
    return _BACKENDS[backend]
