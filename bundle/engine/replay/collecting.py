"""What the routers of all ranks saw, brought together: the routes of whole micro-batches on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bundle.engine.replay.routes import Routes, Routing
from bundle.engine.replay.rows import unseen
from bundle.errors import JobFailed
from bundle.mcore.groups import Axis, Groups
from bundle.sequences.packing import Packing


@dataclass(frozen=True)
class Stages:
    """The layers with routers that each pipeline stage holds, in the order in which it stacks them."""

    layers: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, here: Sequence[int], pp: Axis, routing: Routing) -> "Stages":
        """The stages of a model, asked of all of them (every rank must call it); `here`: this rank's layers.

        Raises JobFailed if they are not together the layers of `routing`, each once.
        """
        found: list[tuple[int, ...]] = [()] * pp.size
        dist.all_gather_object(found, tuple(here), group=pp.group)
        if sorted(layer for stage in found for layer in stage) != list(routing.layers):
            raise JobFailed(
                f"Router replay: the layers with experts are {list(routing.layers)}, but the pipeline stages"
                f" found routers in {[list(stage) for stage in found]}."
            )
        return cls(tuple(found))

    @property
    def most(self) -> int:
        """The layers of the stage that has most."""
        return max(map(len, self.layers))

    def columns(self, layers: Sequence[int]) -> list[int]:
        """Where layers are found when all stages' stacks, filled up to `most`, follow each other."""
        place = {
            layer: stage * self.most + slot
            for stage, held in enumerate(self.layers)
            for slot, layer in enumerate(held)
        }
        return [place[layer] for layer in layers]


def collect(
    seen: Sequence[Tensor],
    packings: Sequence[Packing],
    routing: Routing,
    stages: Stages,
    groups: Groups,
    tp: Axis | None,
) -> list[Routes]:
    """The routes of each micro-batch, whole and unpadded, the same on every rank of a model replica.

    `seen` are this rank's choices [t, L of this stage, k] for each micro-batch. `tp` is the tensor parallel
    axis under sequence parallelism, where its ranks hold different tokens. One collective for each axis,
    whatever the number of layers and micro-batches.
    """
    sizes = [len(one) for one in seen]
    stack = torch.cat(list(seen))
    filled = stack.new_zeros(len(stack), stages.most, routing.topk)
    filled[:, : stack.shape[1]] = stack
    whole = filled.view(torch.uint8)  # not every collective backend has all integer types
    for axis in (tp, groups.cp, groups.pp):
        whole = _gathered(whole, axis)
    # [pp, cp, tp, t, most, k] -> [cp, tp, t, L, k]
    together = whole.view(routing.dtype).permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
    together = together[:, :, :, stages.columns(routing.layers)]
    parts = together.split(sizes, dim=2)
    return [
        Routes(routing.layers, unseen(one, packing)) for one, packing in zip(parts, packings, strict=True)
    ]


def _gathered(x: Tensor, axis: Axis | None) -> Tensor:
    """[ranks, ...] from each rank's [...]."""
    if axis is None or axis.size == 1:
        return x[None]
    whole = x.new_empty(axis.size * len(x), *x.shape[1:])  # gloo takes no other shape
    dist.all_gather_into_tensor(whole, x.contiguous(), group=axis.group)
    return whole.view(axis.size, *x.shape)
