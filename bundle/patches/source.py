"""A megatron tree as text: definitions found by name, without importing anything."""

from typing import Any, Protocol


class Evidence(Protocol):
    """The definitions that a patch names as evidence, and no others: what `Patch.defect` is given."""

    def __getitem__(self, target: str) -> Any:
        """The definition of `target`, or None where the tree has none."""
