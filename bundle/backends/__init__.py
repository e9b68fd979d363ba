"""What differs by accelerator and needs torch; what is known of each without it stands in `capabilities`."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bundle.mcore.runtime import Runtime


def prepare(backend: str) -> "Runtime":
    """The runtime of a backend (cpu, cuda, ascend), made ready in this process before megatron is imported.

    Raises EnvironmentUnfit where this machine, or what was imported already, does not allow it.
    """
    runtime: Runtime = importlib.import_module(f"bundle.backends.{backend}.runtime").prepare()
    return runtime
