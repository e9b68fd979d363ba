"""The masks of one micro-batch: the one that a model is given, and the one that says what is a token."""

from dataclasses import dataclass

from torch import Tensor

from bundle.capabilities import Mask
from bundle.sequences.packing import Packing


@dataclass(frozen=True)
class Masks:
    """What a micro-batch knows of its padding.

    `model` goes into the model: None, or bool [b, s] over whole sequences, True = token. `valid` stays with
    the rows that come out, for post-processing, whatever the model was given: bool, `Packing.shape`, True =
    token. A backend that gives its models no mask must not take it from post-processing too.
    """

    model: Tensor | None
    valid: Tensor


def masks(packing: Packing, wanted: Mask) -> Masks:
    """The masks of a packing for a model that takes `wanted` (Capabilities.mask)."""
    return Masks(packing.uncut.valid if wanted.form == "valid" else None, packing.valid)
