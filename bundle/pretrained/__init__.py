"""The weights of a Hugging Face directory: what its files hold, and whether it fits the model.

Only headers are read here. safetensors holds numbers and their names, and nothing of it is ever executed.
Weights in pickles are refused.
"""

from bundle.pretrained.directory import PretrainedWeights, StoredTensor, find_weights
from bundle.pretrained.matching import (
    describe_weights,
    find_compatible_weights,
    find_model_weights,
    find_recipe_adapter,
    find_recipe_weights,
    find_weights_ignoring_architecture,
    format_similar_name_examples,
    refuse_unequal_copies,
)

__all__ = [
    "PretrainedWeights",
    "StoredTensor",
    "describe_weights",
    "find_compatible_weights",
    "find_model_weights",
    "find_recipe_adapter",
    "find_recipe_weights",
    "find_weights",
    "find_weights_ignoring_architecture",
    "format_similar_name_examples",
    "refuse_unequal_copies",
]
