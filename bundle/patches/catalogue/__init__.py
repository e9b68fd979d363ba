"""The patches and the traps, one module for each area of megatron-core: tuples named PATCHES and TRAPS."""

from bundle.patches.catalogue import (
    attention,
    balancing,
    checkpoints,
    gradients,
    mla,
    mtp,
    multimodal,
    optimizer,
    packed,
    padding,
    recompute,
    router,
    vocabulary,
)
from bundle.patches.entry import Patch, Trap

# In this order wrappers are put on a target that several patches share: the first is the innermost.
PATCHES: tuple[Patch, ...] = (
    *mla.PATCHES,
    *packed.PATCHES,
    *mtp.PATCHES,
    *recompute.PATCHES,
    *router.PATCHES,
    *balancing.PATCHES,
    *gradients.PATCHES,
    *checkpoints.PATCHES,
    *optimizer.PATCHES,
    *padding.PATCHES,
    *vocabulary.PATCHES,
    *attention.PATCHES,
    *multimodal.PATCHES,
)
# Known traps: defects with no narrow fix, whose recipes are refused.
TRAPS: tuple[Trap, ...] = (
    *mla.TRAPS,
    *mtp.TRAPS,
    *recompute.TRAPS,
    *balancing.TRAPS,
    *gradients.TRAPS,
    *checkpoints.TRAPS,
    *optimizer.TRAPS,
    *padding.TRAPS,
    *attention.TRAPS,
    *multimodal.TRAPS,
)
