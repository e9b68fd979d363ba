"""The cuda runtime. `libraries` comes first, before megatron is imported; other modules import megatron."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bundle.mcore.runtime import Runtime


def prepare() -> "Runtime":
    """The runtime of NVIDIA GPUs, with the libraries loaded that megatron is about to look for.

    Raises EnvironmentUnfit where torch sees no GPU or Transformer Engine cannot be loaded.
    """
    from bundle.backends.cuda.runtime import libraries

    libraries.load()
    # It imports megatron, which takes what it finds loaded.
    from bundle.backends.cuda.runtime.cuda import CudaRuntime

    return CudaRuntime()
