"""A prompt as tensors: token ids, and the images and videos that they show."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class VisualInputs:
    """The images and videos of a prompt, in order: `patches` [n, values] of all of them, `grids` [images, 3].

    `seconds` [images] are from one patch of a video to the next; 0 of an image.
    """

    patches: Tensor
    grids: Tensor
    seconds: Tensor


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, those of images and videos as many as their embeddings, and what these show."""

    ids: Sequence[int]
    visual_inputs: VisualInputs | None = None
