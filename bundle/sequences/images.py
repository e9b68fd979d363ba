"""Images of a micro-batch: where they stand in its sequences, and what positions they give to all tokens.

Host integers, for all images at once: no step looks at one image at a time.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from bundle.architectures import Vision
from bundle.errors import JobFailed
from bundle.recipe.alignment import Alignment
from bundle.sequences.packing import Ints, Packing, ramp, starts


@dataclass(frozen=True)
class Images:
    """All images of a micro-batch, one after the other, at least one: blank, where no token stands for it.

    `pixels` [patches, values of a patch], in the order of transformers' image processors. `grids` int64
    [images, 3] are the patches of each in time, height and width; they stay on the host, where towers read
    them. `index` [tokens] is the row of the tower's output that stands in the place of a token, -1: none.
    `positions` [tokens, 3] are those of all tokens in time, height and width. Tokens are concatenated, and
    after `packed` as the model takes them.
    """

    pixels: Tensor
    grids: Tensor
    index: Tensor
    positions: Tensor

    @classmethod
    def of(cls, pixels: Tensor, grids: Ints, ids: Ints, lengths: Ints, vision: Vision) -> "Images":
        """Those of concatenated sequences [tokens], in the order in which these name them.

        Raises JobFailed where there are more or fewer places for images than images are.
        """
        places = np.flatnonzero(ids == vision.image_token)
        sizes = grids // (1, vision.merge_size, vision.merge_size)
        if (needed := int(sizes.prod(1).sum())) != len(places):
            raise JobFailed(
                f"Images of {needed} embeddings in sequences that have {len(places)} tokens for them"
                f" (image_token_id {vision.image_token})."
            )
        index = np.full(len(ids), -1)
        index[places] = np.arange(len(places))
        counted = positions(lengths, places, sizes)
        if not len(grids):
            grids = np.asarray([[1, vision.merge_size, vision.merge_size]])
            pixels = torch.zeros(vision.patches, vision.patch_values)
        return cls(pixels, *map(torch.from_numpy, (grids, index, counted)))

    def to(self, device: torch.device | str) -> "Images":
        """The same with all that a model reads there on a device."""
        moved = (x.to(device, non_blocking=True) for x in (self.pixels, self.index, self.positions))
        pixels, index, counted = moved
        return Images(pixels, self.grids, index, counted)

    def packed(self, packing: Packing) -> "Images":
        """As a model takes them on this rank: `index` [b, s / cp], `positions` [3, b, s / cp].

        In thd positions [3, 1, t] are those of all ranks' rows, of which attention takes its own.
        """
        index = packing.pack(self.index, fill=-1)
        if packing.layout == "thd" and packing.alignment.cp > 1:
            packing = Packing(packing.padding, Alignment("thd"), 0, packing.device)
        return replace(self, index=index, positions=packing.pack(self.positions).movedim(-1, 0))


def positions(lengths: Ints, places: Ints, sizes: Ints) -> Ints:
    """The positions [tokens, 3] in time, height and width, as Qwen2-VL counts them.

    Of concatenated sequences of `lengths`, whose tokens at `places` are those of images of `sizes`
    [images, 3], in time, height and width after merging. Text counts on in all three. An image begins at the
    next number and counts up from there in its own three; what follows goes on behind the larger of its
    height and width.
    """
    begins = starts(lengths)
    alone = ramp(np.zeros_like(lengths), lengths)  # places in the own sequence
    counts = sizes.prod(1)
    first = places[starts(counts)] if len(counts) else counts
    behind = np.zeros(len(alone) + 1, np.int64)  # by how much the count falls back, from a token on
    behind[first + counts] = counts - sizes[:, 1:].max(1, initial=0)
    behind = np.cumsum(behind)
    behind = behind[:-1] - np.repeat(behind[begins], lengths)
    found = np.repeat((alone - behind)[:, None], 3, 1)
    within, (_, height, width) = ramp(np.zeros_like(counts), counts), np.repeat(sizes, counts, 0).T
    own = np.stack([within // (height * width), within // width % height, within % width], 1)
    found[places] = np.repeat(found[first], counts, 0) + own
    return found
