"""How two recipes differ, key by key, and which differences a resumed run may have."""

from collections.abc import Iterator
from typing import Any

from bundle.frozen import frozen
from bundle.recipe.recipe import Recipe

# Sections and keys that decide where and how fast a run computes, not what.
FREE_ON_RESUME = ("devices", "parallel", "distributed", "checkpoint", "metrics", "train.log_interval")


@frozen
class Difference:
    """One key whose value changed; None where a side does not have it."""

    key: str
    old: Any
    new: Any

    @property
    def free_on_resume(self) -> bool:
        """Whether a resumed run may change this key and still be the same run."""
        return any(self.key == free or self.key.startswith(f"{free}.") for free in FREE_ON_RESUME)

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} -> {self.new!r}"


def differences(old: Recipe, new: Recipe) -> list[Difference]:
    """Every key whose value differs, in the recipe's order."""
    before, after = dict(_flat(old.dump())), dict(_flat(new.dump()))
    keys = dict.fromkeys([*after, *before])
    return [Difference(k, before.get(k), after.get(k)) for k in keys if before.get(k) != after.get(k)]


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
