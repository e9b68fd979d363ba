"""Images of a micro-batch: their places in its sequences, and the positions that they give to all tokens.

Both are host integers, computed for all images at once: no step handles one image at a time. Videos are
images of several patches in time.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bundle.architectures import VisionArchitecture
from bundle.errors import JobFailed
from bundle.packing.packing import Ints, Packing, compute_starts, concatenate_ranges
from bundle.recipe.alignment import Alignment
from bundle.transfers import copy_to_device


@dataclass(frozen=True)
class ImageInputs:
    """All images and videos of a micro-batch, in order, at least one: a blank one where no token needs it.

    `pixels` [patches, values of a patch] are in the order of transformers' image processors. `grids` int64
    [images, 3] are the patches of each in time, height and width; they stay on the host, where towers read
    them. `index` [tokens] is the row of the tower's output that takes the place of a token, -1: none.
    `positions` [tokens, 3] are those of all tokens in time, height and width. Tokens are concatenated; after
    `pack` they are in the model's form.
    """

    pixels: Tensor
    grids: Tensor
    index: Tensor
    positions: Tensor

    @classmethod
    def from_sequences(
        cls,
        pixels: Tensor,
        grids: Ints,
        ids: Ints,
        lengths: Ints,
        vision: VisionArchitecture,
        seconds: NDArray[np.float64] | None = None,
    ) -> "ImageInputs":
        """Return the images of concatenated sequences [tokens], in the order in which their tokens name them.

        `seconds` [images] is the time from one patch of a video to the next, 0 for an image; None: all are
        images. Raise JobFailed where the number of places for images differs from the number of embeddings.
        """
        tokens = (vision.image_token, vision.video_token)
        places = np.flatnonzero(np.isin(ids, [token for token in tokens if token is not None]))
        sizes = grids // (1, vision.merge_size, vision.merge_size)
        if (needed := int(sizes.prod(1).sum())) != len(places):
            raise JobFailed(
                f"the images need {needed} image tokens, but the sequences have {len(places)}"
                f" (image_token_id {vision.image_token})."
            )
        index = np.full(len(ids), -1)
        index[places] = np.arange(len(places))
        counted = compute_positions(
            lengths, places, *_compute_grids_and_position_steps(sizes, seconds, vision)
        )
        if not len(grids):
            grids = np.asarray([[1, vision.merge_size, vision.merge_size]])
            pixels = torch.zeros(vision.patches_per_embedding, vision.values_per_patch)
        return cls(pixels, *map(torch.from_numpy, (grids, index, counted)))

    def to(self, device: torch.device | str) -> "ImageInputs":
        """Return a copy with the tensors that a model reads on a device moved to it."""
        tensors = (copy_to_device(x, torch.device(device)) for x in (self.pixels, self.index, self.positions))
        pixels, index, counted = tensors
        return ImageInputs(pixels, self.grids, index, counted)

    def pack(self, packing: Packing) -> "ImageInputs":
        """Return the inputs of a model on this rank: `index` [b, s / cp], `positions` [3, b, s / cp].

        In thd the positions [3, 1, t] are those of all ranks' rows; attention takes its own.
        """
        index = packing.pack_concatenated_tokens(self.index, fill=-1)
        if packing.qkv_format == "thd" and packing.alignment.cp > 1:
            packing = Packing(packing.padding, Alignment("thd"), 0, packing.device)
        return replace(
            self, index=index, positions=packing.pack_concatenated_tokens(self.positions).movedim(-1, 0)
        )


def _compute_grids_and_position_steps(
    sizes: Ints, seconds: NDArray[np.float64] | None, vision: VisionArchitecture
) -> tuple[Ints, NDArray[np.float32]]:
    """Return the grids that count positions as one image each, and their steps in time.

    The step is the difference in position from one patch to the next in time.
    """
    if vision.has_frame_timestamps:
        frames = sizes[:, 0]
        sizes = np.repeat(sizes, frames, 0) * (0, 1, 1) + (1, 0, 0)
    paces = np.ones(len(sizes), np.float32)
    if seconds is not None and not vision.has_frame_timestamps:
        moving = seconds > 0  # as transformers' tensors have them, in float32
        paces[moving] = np.float32(vision.tokens_per_second) * seconds[moving].astype(np.float32)
    return sizes, paces


def compute_positions(lengths: Ints, places: Ints, sizes: Ints, paces: NDArray[np.float32]) -> Ints:
    """Return the positions [tokens, 3] in time, height and width, as Qwen2-VL counts them.

    `lengths` are those of the concatenated sequences. The tokens at `places` belong to images of `sizes`
    [images, 3], in time, height and width after merging. Text counts on in all three. An image begins at the
    next number and counts up from there in its own three. In time it counts by its pace [images], rounded
    down, as in Qwen2.5-VL. The text after it goes on behind the largest number of all three, as the models
    were trained (transformers 4, Qwen's own code, SGLang). transformers 5.3 and later leave time out there.
    """
    begins = compute_starts(lengths)
    alone = concatenate_ranges(np.zeros_like(lengths), lengths)  # places in the own sequence
    counts = sizes.prod(1)
    first = places[compute_starts(counts)] if len(counts) else counts
    lasts = ((sizes[:, 0] - 1).astype(np.float32) * paces).astype(np.int64)
    behind = np.zeros(len(alone) + 1, np.int64)  # by how much the count falls back, from a token on
    behind[first + counts] = counts - np.maximum(sizes[:, 1:].max(1, initial=0), lasts + 1)
    behind = np.cumsum(behind)
    behind = behind[:-1] - np.repeat(behind[begins], lengths)
    token_positions = np.repeat((alone - behind)[:, None], 3, 1)
    within, (_, height, width) = (
        concatenate_ranges(np.zeros_like(counts), counts),
        np.repeat(sizes, counts, 0).T,
    )
    steps = (within // (height * width)).astype(np.float32)
    time = (steps * np.repeat(paces, counts)).astype(np.int64)
    offsets = np.stack([time, within // width % height, within % width], 1)
    token_positions[places] = np.repeat(token_positions[first], counts, 0) + offsets
    return token_positions
