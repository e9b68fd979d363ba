"""Floating-point operations (FLOPs) of training a vision tower, which follow from the images that it sees.

They are counted as the decoder's are (`bundle.planning.size`): matrix products, 2 for each multiply-add. A
weight meets every patch once, a projector's weight every embedding. In a block each patch meets all patches
of its image (in a video: those of its own time). In a block with windows it meets the patches of its window;
the last windows in height and in width may be smaller.

The backward pass takes twice as many for trained weights, and as many for frozen weights that a gradient goes
through. It takes none where nothing before is trained, and none goes to pixels.
"""

import math
from typing import Any, NamedTuple

from bundle.architectures import Architecture, VisionArchitecture, adapters
from bundle.architectures.tensors import Tensors, is_projector
from bundle.recipe.recipe import Model

# Names of the layer that reads pixels, and of the table that is looked up.
_PIXEL_INPUT, _LOOKUP_TABLE = ".patch_embed.", ".pos_embed."


class TowerFlops(NamedTuple):
    """FLOPs of both passes for one patch, one embedding and one pair, and the tower that counts them."""

    patch_flops: int
    embedding_flops: int
    pair_flops: int  # of a patch and one that it meets, in one block
    vision: VisionArchitecture

    def count_training_flops(self, grids: Any) -> int:
        """Return the FLOPs of training on images with these patches.

        `grids` is a numpy array [images, 3] in time, height and width.
        """
        v = self.vision
        times, sides = grids[:, 0], grids[:, 1:]
        full = sum(number in v.full_layers or not v.window_size for number in range(v.num_layers))
        pairs = full * int((times * sides.prod(1) ** 2).sum())
        if full < v.num_layers:
            window = v.window_size // v.patch_size // v.merge_size  # embeddings
            full_windows, rest = divmod(sides // v.merge_size, window)
            along = (full_windows * window**2 + rest**2) * v.patches_per_embedding
            pairs += (v.num_layers - full) * int((times * along.prod(1)).sum())
        patches = int(grids.prod(1).sum())
        return (
            patches * self.patch_flops
            + patches // v.patches_per_embedding * self.embedding_flops
            + pairs * self.pair_flops
        )


def compute_tower_flop_coefficients(architecture: Architecture, model: Model) -> TowerFlops | None:
    """Return the FLOPs of a model's tower, by the parts that `model` trains; None without a tower."""
    vision = architecture.vision
    if vision is None:
        return None
    table = list(Tensors(architecture).build_tower())
    lora, frozen = model.lora, model.vision
    adapted = [
        tower_tensor.name
        for tower_tensor in table
        if lora and adapters.build_adapter_pairs(tower_tensor, lora.targets, lora.rank)
    ]
    learns = {
        projector: any(is_projector(name) == projector for name in adapted)
        if lora
        else not (frozen.freeze_projector if projector else frozen.freeze_tower)
        for projector in (False, True)
    }
    patch_flops = embedding_flops = 0
    for tensor in table:
        if len(tensor.shape) < 2 or _LOOKUP_TABLE in tensor.name:
            continue
        multiplied, projector = 2 * math.prod(tensor.shape), is_projector(tensor.name)
        is_trained = learns[projector] and lora is None  # it has a gradient of its own
        has_gradient = learns[False] or learns[projector]  # one goes through it
        passes = 1 + is_trained + (has_gradient and _PIXEL_INPUT not in tensor.name)
        if projector:
            embedding_flops += passes * multiplied
        else:
            patch_flops += passes * multiplied
    return TowerFlops(
        patch_flops, embedding_flops, (3 if learns[False] else 1) * 4 * vision.hidden_size, vision
    )
