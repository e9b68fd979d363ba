"""Router replay: the experts that one forward pass chose, recorded, and chosen again in another."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from bundle.engine.microbatch import MicroBatch
from bundle.engine.routes import Routes, Routing, forced, unseen
from bundle.errors import JobFailed, UsageError
from bundle.mcore import context, routers
from bundle.mcore.groups import Axis, Groups
from bundle.recipe import Recipe
from bundle.sequences.packing import Packing


@dataclass
class _Run:
    """One run of a schedule: its routers' choices, and what each model chunk chose, by micro-batch."""

    choices: context.Choices
    chosen: list[list[Tensor]] = field(default_factory=list)


class RouterReplay:
    """The routers of one engine's model chunks; nothing of a run outlives it, whether it ends or raises."""

    def __init__(self, recipe: Recipe, models: Sequence[torch.nn.Module], groups: Groups) -> None:
        """`models` are the bare chunks of this rank. Every rank must call it."""
        self._groups, self._routing = groups, None
        self._tp = groups.tp if recipe.parallel.sequence_parallel else None
        self._run: _Run | None = None
        self._recorded: list[Routes] | None = None
        if recipe.model.router_replay:
            self._routing = Routing.of(recipe.architecture)
            self._routers = [routers.of_layers(model) for model in models]
            here = [layer for held in self._routers for layer in held.values()]
            self._stages = Stages.of(here, groups.pp, self._routing)

    @property
    def routing(self) -> Routing:
        """What routes of this model are; UsageError if the recipe has no router replay."""
        if self._routing is None:
            raise UsageError("Routes are recorded and replayed only with `model.router_replay: true`.")
        return self._routing

    @contextmanager
    def recording(self) -> Iterator[list[Routes]]:
        """A list that gets the routes of each micro-batch that is run inside, in this order."""
        _ = self.routing
        before, self._recorded = self._recorded, []
        try:
            yield self._recorded
        finally:
            self._recorded = before

    @contextmanager
    def of_run(self, micro_batches: Sequence[MicroBatch], *, backward: bool) -> Iterator[None]:
        """Around one run of a schedule, which all ranks enter with the same micro-batches."""
        if self._recorded is None and all(one.routes is None for one in micro_batches):
            yield
            return
        routing = self.routing
        _check(routing, micro_batches)
        layers = {router: layer for held in self._routers for router, layer in held.items()}
        choices = context.Choices(layers, routing.dtype, backward=backward)
        self._run = _Run(choices, [[] for _ in self._routers])
        try:
            with context.choices.set(self._run.choices):
                yield
            if self._recorded is not None:
                seen = [torch.cat(chunks, dim=1) for chunks in zip(*self._run.chosen, strict=True)]
                packings = [one.packing for one in micro_batches]
                self._recorded += collect(seen, packings, routing, self._stages, self._groups, self._tp)
        finally:
            self._run = None

    @contextmanager
    def of_forward(self, chunk: int, micro_batch: MicroBatch) -> Iterator[None]:
        """Around one forward pass of model chunk number `chunk` of this rank."""
        run = self._run
        if run is None:
            yield
            return
        layers = tuple(self._routers[chunk].values())
        part, parts = (self._tp.rank, self._tp.size) if self._tp else (0, 1)
        packing = micro_batch.packing
        given = forced(micro_batch.routes, packing, self.routing, layers, part=part, parts=parts)
        with run.choices.of_forward(given) as made:
            yield
        if silent := [layer for layer in layers if layer not in made]:
            raise JobFailed(
                f"Router replay: the routers of layers {silent} choose their experts without asking. Set"
                " moe_router_fusion=False, use a load balancing type other than sinkhorn, and see"
                " `mcore-bundle patches list` for what was not applied."
            )
        if self._recorded is not None:
            rows = packing.shape[0] * packing.shape[1] // parts
            none = torch.empty(rows, 0, self.routing.topk, dtype=self.routing.dtype, device=packing.device)
            run.chosen[chunk].append(torch.stack([made[layer] for layer in layers], 1) if layers else none)


def _check(routing: Routing, micro_batches: Sequence[MicroBatch]) -> None:
    violations = [
        f"micro-batch {number}: {misfit}"
        for number, one in enumerate(micro_batches)
        if one.routes is not None
        for misfit in routing.misfits(one.routes, one.packing.padding.tokens)
    ]
    if violations:
        raise JobFailed("Routes that were given do not fit:", violations)


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
