"""The job file: a schema, built-in recipes, overrides, and every violation at once."""

from bundle.recipe.comparison import Difference, differences
from bundle.recipe.loading import find, from_mapping, load
from bundle.recipe.parallel import Layout, Parallel
from bundle.recipe.recipe import Recipe

__all__ = [
    "Difference",
    "Layout",
    "Parallel",
    "Recipe",
    "differences",
    "find",
    "from_mapping",
    "load",
]
