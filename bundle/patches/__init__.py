"""The catalogue of patches and the decisions about it: data, source text, metadata; no torch, no megatron.

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
    # A program that only decides does not import the code that applies patches and reads frameworks.
    if name != "enable":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bundle.patches.external_program import enable

    return enable
