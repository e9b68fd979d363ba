"""The patches, one module for each area of megatron-core; each holds a tuple named PATCHES."""

from bundle.patches.catalogue import (
    attention,
    balancing,
    dist_checkpoint,
    gated_delta,
    gradients,
    mla,
    mla_ranks,
    moe,
    mtp,
    multimodal,
    norm,
    offload,
    optimizer,
    optimizer_checkpoint,
    packed,
    padding,
    recompute,
    router,
    vocabulary,
)
from bundle.patches.entry import Patch

# In this order wrappers are put on a target that several patches share: the first is the innermost.
PATCHES: tuple[Patch, ...] = (
    *mla.PATCHES,
    *mla_ranks.PATCHES,
    *packed.PATCHES,
    *mtp.PATCHES,
    *recompute.PATCHES,
    *router.PATCHES,
    *balancing.PATCHES,
    *gradients.PATCHES,
    *norm.PATCHES,
    *dist_checkpoint.PATCHES,
    *moe.PATCHES,
    *optimizer.PATCHES,
    *offload.PATCHES,
    *padding.PATCHES,
    *vocabulary.PATCHES,
    *optimizer_checkpoint.PATCHES,
    *attention.PATCHES,
    *gated_delta.PATCHES,
    *multimodal.PATCHES,
)
