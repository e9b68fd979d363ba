"""The patch list and what is decided about it: data, source text and metadata; never torch or megatron.

In a program of somebody else, before it imports megatron:

    from bundle import patches
    patches.enable(features=("mtp", "cp"))
"""

from typing import TYPE_CHECKING, Any

from bundle.patches.entry import Decision, Patch, PatchAction, Presence, Replacement, Seam, Trap

if TYPE_CHECKING:
    from bundle.patches.external_program import enable

__all__ = [
    "Decision",
    "Patch",
    "PatchAction",
    "Presence",
    "Replacement",
    "Seam",
    "Trap",
    "enable",
]


def __getattr__(name: str) -> Any:
    # Who only decides does not import what applies the decisions and reads the code of frameworks.
    if name != "enable":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bundle.patches.external_program import enable

    return enable
