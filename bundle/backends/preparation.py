"""Makes a backend ready in this process before megatron is imported: the patches first, then its runtime."""

import hashlib
import importlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bundle import stack
from bundle.patches import applying, plan, subject, survey, table
from bundle.patches.plan import PatchPlan
from bundle.recipe import Recipe

if TYPE_CHECKING:
    from bundle.mcore.runtime import Runtime


@dataclass(frozen=True)
class Prepared:
    """The backend's runtime, and what all ranks must have in common: a name and a short value each."""

    runtime: "Runtime"
    identity: dict[str, str]


def patch_plan(recipe: Recipe, backend: str, *, allow_drift: Collection[str] = ()) -> PatchPlan:
    """The patches of this recipe for the megatron-core that is installed; nothing of it is imported.

    Raises PatchError where a needed patch cannot be applied, UsageError where the recipe meets a known trap.
    """
    installed, known = stack.detect(), table.load()
    found = survey.survey(
        subject.installed(installed, known),
        known,
        installed,
        backend=backend,
        features=recipe.features,
        allowed=allow_drift,
    )
    return plan.make(found)


def prepare(recipe: Recipe, backend: str, *, allow_drift: Collection[str] = ()) -> Prepared:
    """The runtime of `backend` (cpu, cuda, ascend), with the patches applied for the life of this process."""
    patches = patch_plan(recipe, backend, allow_drift=allow_drift)
    applying.apply(patches)
    runtime = importlib.import_module(f"bundle.backends.{backend}.runtime").prepare()
    return Prepared(runtime, {"recipe": _digest(recipe), "backend": backend, **patches.fields()})


def _digest(recipe: Recipe) -> str:
    return hashlib.sha256(json.dumps(recipe.dump(), sort_keys=True).encode()).hexdigest()[:16]
