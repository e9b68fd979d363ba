"""The sizes that FP8 products do not take, as far as a plan knows them: weights, and rows of equal length."""

import re
from collections.abc import Iterator

from bundle.capabilities import LayerTraits
from bundle.fp8 import SCALINGS, Scaling
from bundle.planning.parameters import parameters
from bundle.planning.placement import Placement
from bundle.planning.problem import Problem, recipe_problem
from bundle.recipe import Recipe

# Weights of the layers that multiply in FP8: not the embedding, the output layer, routers and norms.
_MULTIPLIED = r"(linear_\w+|eh_proj)\.weight\d*$"
_NUMBERS = r"\.\d+|\d+$"


def fp8_problems(recipe: Recipe, placement: Placement, layers: LayerTraits) -> Iterator[Problem]:
    """Every weight and every row length that is refused in the first step otherwise, whatever the backend."""
    if recipe.model.fp8 is None:
        return
    scaling = recipe.model.fp8.scaling
    yield from _weights(recipe, placement, layers, scaling)
    if not recipe.data.packed:  # a pack is padded
        yield from _rows(recipe, scaling)


def _weights(
    recipe: Recipe, placement: Placement, layers: LayerTraits, scaling: Scaling
) -> Iterator[Problem]:
    """A weight of several layers is named once."""
    multiple = SCALINGS[scaling]
    refused = {
        (re.sub(_NUMBERS, "", tensor.name), tensor.shape)
        for chunk in (chunk for chunks in placement.stages for chunk in chunks)
        for tensor in parameters(recipe.architecture, recipe.parallel, chunk, layers)
        if re.search(_MULTIPLIED, tensor.name) and any(size % multiple.rows for size in tensor.shape)
    }
    for name, shape in sorted(refused):
        yield recipe_problem(
            f"model.fp8: {scaling} FP8 multiplies in multiples of {multiple.rows}, and on each rank {name} is"
            f" {list(shape)}: change that size of the model, or tp and etp ({multiple.source})"
        )


def _rows(recipe: Recipe, scaling: Scaling) -> Iterator[Problem]:
    rows, length = recipe.train.micro_batch_size, recipe.data.sequence_length
    multiple = recipe.alignment.total
    if rows * length % multiple:
        yield recipe_problem(
            f"data.sequence_length: {scaling} FP8 takes multiples of {SCALINGS[scaling].rows} tokens on every"
            f" rank, so a micro-batch of {rows} x {length} must be a multiple of {multiple}: change"
            " the length or train.micro_batch_size, or pack (data.packed)"
        )
