"""The weights of a Hugging Face directory: what its files say that they hold, and whether that is the model.

Headers alone are read here. safetensors holds numbers and their names, so nothing of it is ever run; weights
in pickles are refused.
"""

from bundle.pretrained.directory import Entry, Pretrained, weights_in
from bundle.pretrained.matching import (
    adapter_of_recipe,
    described,
    of_another_directory,
    of_directory,
    of_recipe,
    one_of_each_kind,
    opened,
    refuse_unequal,
)

__all__ = [
    "Entry",
    "Pretrained",
    "adapter_of_recipe",
    "described",
    "of_another_directory",
    "of_directory",
    "of_recipe",
    "one_of_each_kind",
    "opened",
    "refuse_unequal",
    "weights_in",
]
