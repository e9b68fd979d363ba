"""The patch list and what is decided about it: data, source text and metadata; never torch or megatron.

In a program of somebody else, before it imports megatron:

    from bundle import patches
    patches.enable(features=("mtp", "cp"))
"""

from bundle.patches.enabling import enable
from bundle.patches.entry import Action, Decision, Patch, Presence, Replacement, Seam, Trap

__all__ = [
    "Action",
    "Decision",
    "Patch",
    "Presence",
    "Replacement",
    "Seam",
    "Trap",
    "enable",
]
