"""A prompt as tensors: token ids, and the images and videos that they show."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class VisualInputs:
    """The images and videos of a prompt, in order: `patches` [n, values] of all of them, `grids` [images, 3].

    `seconds` [images] is the time from one patch of a video to the next; 0 for an image.
    """

    patches: Tensor
    grids: Tensor
    seconds: Tensor


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids and the images of a prompt; an image has as many token ids as embeddings."""

    ids: Sequence[int]
    visual_inputs: VisualInputs | None = None
