"""The patch list and what is decided about it: data, source text and metadata; never torch or megatron."""

from bundle.patches.entry import Action, Decision, Patch, Presence, Replacement, Seam, Trap

__all__ = [
    "Action",
    "Decision",
    "Patch",
    "Presence",
    "Replacement",
    "Seam",
    "Trap",
]
