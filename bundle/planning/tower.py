"""Floating-point operations (FLOPs) of training a vision tower, which follow from the images that it sees.

They are counted as the decoder's are (`bundle.planning.size`): matrix products, 2 for each multiply-add. A
weight meets every patch once, a projector's every embedding. In a block each patch meets all patches of its
image (of a video: of its own time), in one with windows those of its own window, of which the last in height
and in width may be smaller.

The backward pass takes twice as many for what is trained, as many for frozen weights that a gradient goes
through, and none where nothing before is trained; none goes to pixels.
"""

import math
from typing import Any, NamedTuple

from bundle.architectures import Architecture, Vision, adapters
from bundle.architectures.tensors import Tensors, is_projector
from bundle.recipe.recipe import Model

# What reads pixels, and what is looked up.
_FIRST, _LOOKED_UP = ".patch_embed.", ".pos_embed."


class TowerSize(NamedTuple):
    """FLOPs of a forward and a backward pass, for one of each, and what tells how many there are."""

    of_patch: int
    of_embedding: int
    of_pair: int  # of a patch and one that it meets, in one block
    vision: Vision

    def training_flops(self, grids: Any) -> int:
        """For images of these patches, a numpy array [images, 3] in time, height and width."""
        v = self.vision
        times, sides = grids[:, 0], grids[:, 1:]
        full = sum(number in v.full_layers or not v.window_size for number in range(v.num_layers))
        pairs = full * int((times * sides.prod(1) ** 2).sum())
        if full < v.num_layers:
            window = v.window_size // v.patch_size // v.merge_size  # embeddings
            whole, rest = divmod(sides // v.merge_size, window)
            along = (whole * window**2 + rest**2) * v.patches
            pairs += (v.num_layers - full) * int((times * along.prod(1)).sum())
        patches = int(grids.prod(1).sum())
        return patches * self.of_patch + patches // v.patches * self.of_embedding + pairs * self.of_pair


def tower_size(architecture: Architecture, model: Model) -> TowerSize | None:
    """What the tower of a model costs, of which is trained what `model` says; None where there is none."""
    vision = architecture.vision
    if vision is None:
        return None
    table = list(Tensors(architecture).tower())
    lora, frozen = model.lora, model.vision
    adapted = [of.name for of in table if lora and adapters.pairs(of, lora.targets, lora.rank)]
    learns = {
        projector: any(is_projector(name) == projector for name in adapted)
        if lora
        else not (frozen.freeze_projector if projector else frozen.freeze_tower)
        for projector in (False, True)
    }
    of_patch = of_embedding = 0
    for tensor in table:
        if len(tensor.shape) < 2 or _LOOKED_UP in tensor.name:
            continue
        multiplied, projector = 2 * math.prod(tensor.shape), is_projector(tensor.name)
        own = learns[projector] and lora is None  # it has a gradient of its own
        through = learns[False] or learns[projector]  # one goes through it
        passes = 1 + own + (through and _FIRST not in tensor.name)
        if projector:
            of_embedding += passes * multiplied
        else:
            of_patch += passes * multiplied
    return TowerSize(of_patch, of_embedding, (3 if learns[False] else 1) * 4 * vision.hidden_size, vision)
