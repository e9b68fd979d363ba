"""What an accelerator can, as data with reasons: layers, attention kernels, FP8, masks, environment.

Everything that may be known about a backend without torch; `backends` holds what needs it.
"""

from bundle.capabilities.ascend import ASCEND
from bundle.capabilities.attention import AttentionKernel
from bundle.capabilities.capabilities import (
    LOCAL,
    TRANSFORMER_ENGINE,
    Capabilities,
    Choice,
    LayerTraits,
    Mask,
    Variable,
)
from bundle.capabilities.cpu import CPU
from bundle.capabilities.cuda import CUDA

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
    "Variable",
    "of",
]

_BACKENDS = {can.backend: can for can in (CPU, CUDA, ASCEND)}


def of(backend: str) -> Capabilities:
    """What a backend (cpu, cuda, ascend) offers."""
    return _BACKENDS[backend]
