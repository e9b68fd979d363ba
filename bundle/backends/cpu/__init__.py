"""The cpu. `facade` comes first, before megatron is imported; other modules import megatron."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bundle.backends import Runtime


def set_up_runtime() -> "Runtime":
    """Return the cpu's runtime; install the facade and hide libraries for GPUs for the life of this process.

    Raises EnvironmentUnfit where a GPU is visible, or megatron or such a library was imported already.
    """
    from bundle.backends.cpu import facade

    facade.hide_gpu_libraries()
    facade.install()
    # It imports megatron, which must meet the facade.
    from bundle.backends.cpu.runtime import CpuRuntime

    return CpuRuntime()
