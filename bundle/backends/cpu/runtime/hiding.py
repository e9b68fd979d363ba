"""Keeps libraries for GPUs out of a process in which megatron runs on a cpu."""

import sys

from bundle.errors import EnvironmentUnfit

# Megatron takes their optimizer and gradient clipping wherever they can be imported; none takes a cpu tensor.
LIBRARIES = ("transformer_engine", "apex")


def hide() -> None:
    """Lets imports of these libraries fail in this process as if they were not installed.

    Raises EnvironmentUnfit where one of them is there already.
    """
    imported = [name for name in LIBRARIES if sys.modules.get(name) is not None]
    if imported:
        raise EnvironmentUnfit(
            f"backend cpu: {' and '.join(imported)} was imported before, and megatron would compute with it;"
            " choose the cpu before anything for GPUs is imported"
        )
    sys.modules.update(dict.fromkeys(LIBRARIES))  # type: ignore[arg-type]
