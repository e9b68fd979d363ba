"""NVIDIA GPUs. `libraries` comes first, before megatron is imported; `runtime` imports megatron."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bundle.backends.runtime import Runtime


def prepare() -> "Runtime":
    """The runtime of NVIDIA GPUs, with the libraries loaded that megatron is about to look for.

    Raises EnvironmentUnfit where torch sees no GPU or Transformer Engine cannot be loaded.
    """
    from bundle.backends.cuda import libraries

    libraries.load()
    # It imports megatron, which takes what it finds loaded.
    from bundle.backends.cuda.runtime import CudaRuntime

    return CudaRuntime()
