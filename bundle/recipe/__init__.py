"""The job file: its keys, the recipes that come with the package, and every violation at once."""

from bundle.recipe.loading import about, built_in, find, from_mapping, load, with_steps
from bundle.recipe.recipe import Difference, Recipe, differences, flat
from bundle.recipe.sections import Parallel

__all__ = [
    "Difference",
    "Parallel",
    "Recipe",
    "about",
    "built_in",
    "differences",
    "find",
    "flat",
    "from_mapping",
    "load",
    "with_steps",
]
