"""The job file: its keys, the recipes that come with the package, and every violation at once."""

from bundle.recipe.loading import (
    describe_built_in,
    find_recipe,
    from_mapping,
    list_built_in,
    load,
    load_values,
    with_epochs_as_steps,
)
from bundle.recipe.recipe import Recipe, RecipeDifference, flatten, list_differences
from bundle.recipe.sections import Parallel

__all__ = [
    "Parallel",
    "Recipe",
    "RecipeDifference",
    "describe_built_in",
    "find_recipe",
    "flatten",
    "from_mapping",
    "list_built_in",
    "list_differences",
    "load",
    "load_values",
    "with_epochs_as_steps",
]
