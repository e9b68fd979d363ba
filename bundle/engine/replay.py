"""Router replay: the experts that one forward pass chose, recorded, and chosen again in another."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from bundle.engine.microbatch import MicroBatch
from bundle.engine.routes import Routes, Routing, build_forced_routes_with_padding, from_router_rows
from bundle.errors import JobFailed, UsageError
from bundle.mcore import context, routers
from bundle.mcore.groups import Groups, ParallelGroup
from bundle.packing.packing import Packing
from bundle.recipe import Recipe


@dataclass
class _ScheduleRun:
    """One run of a schedule: its routers' choices, and what each model chunk chose, by micro-batch."""

    choices: context.RouterChoices
    chosen: list[list[Tensor]] = field(default_factory=list)


class RouterReplay:
    """The routers of one engine's model chunks; nothing of a run outlives it, whether it ends or raises."""

    def __init__(self, recipe: Recipe, models: Sequence[torch.nn.Module], groups: Groups) -> None:
        """`models` are the bare chunks of this rank. Every rank must call it."""
        self._groups, self._routing = groups, None
        self._tp = groups.tp if recipe.parallel.sequence_parallel else None
        self._run: _ScheduleRun | None = None
        self._recorded: list[Routes] | None = None
        if recipe.model.router_replay:
            self._routing = Routing.from_architecture(recipe.architecture)
            self._routers = [routers.map_decoder_routers_to_layers(model) for model in models]
            local_layers = [layer for chunk_routers in self._routers for layer in chunk_routers.values()]
            self._stages = RouterStages.gather(local_layers, groups.pp, self._routing)

    @property
    def routing(self) -> Routing:
        """The routing of this model. Raises UsageError if the recipe has no router replay."""
        if self._routing is None:
            raise UsageError("model.router_replay: must be true to record or replay routes, but is false.")
        return self._routing

    @contextmanager
    def record_routes(self) -> Iterator[list[Routes]]:
        """Yield a list that gets the routes of each micro-batch that runs inside, in this order."""
        _ = self.routing
        before, self._recorded = self._recorded, []
        try:
            yield self._recorded
        finally:
            self._recorded = before

    @contextmanager
    def replay_micro_batch_routes(
        self, micro_batches: Sequence[MicroBatch], *, has_backward: bool
    ) -> Iterator[None]:
        """Record and replay in one run of a schedule, which all ranks enter with the same micro-batches."""
        if self._recorded is None and all(micro_batch.routes is None for micro_batch in micro_batches):
            yield
            return
        routing = self.routing
        _check_routes(routing, micro_batches)
        layers = {router: layer for chunk_routers in self._routers for router, layer in chunk_routers.items()}
        choices = context.RouterChoices(layers, routing.dtype, has_backward=has_backward)
        self._run = _ScheduleRun(choices, [[] for _ in self._routers])
        try:
            with context.router_choices.set(self._run.choices):
                yield
            if self._recorded is not None:
                local_choices = [torch.cat(chunks, dim=1) for chunks in zip(*self._run.chosen, strict=True)]
                packings = [micro_batch.packing for micro_batch in micro_batches]
                self._recorded += gather_micro_batch_routes(
                    local_choices, packings, routing, self._stages, self._groups, self._tp
                )
        finally:
            self._run = None

    @contextmanager
    def record_and_replay_forward(self, chunk: int, micro_batch: MicroBatch) -> Iterator[None]:
        """Record and replay in one forward pass of model chunk number `chunk` of this rank."""
        run = self._run
        if run is None:
            yield
            return
        layers = tuple(self._routers[chunk].values())
        part, parts = (self._tp.rank, self._tp.size) if self._tp else (0, 1)
        packing = micro_batch.packing
        forced_routes = build_forced_routes_with_padding(
            micro_batch.routes, packing, self.routing, layers, part=part, parts=parts
        )
        with run.choices.record_forward(forced_routes) as chosen_experts:
            yield
        if silent := [layer for layer in layers if layer not in chosen_experts]:
            raise JobFailed(
                f"Router replay: the routers of layers {silent} choose experts outside the replayed"
                " function. Set moe_router_fusion=False, use a load balancing type other than sinkhorn,"
                " and look in `mcore-bundle patches list` for patches that are not applied."
            )
        if self._recorded is not None:
            rows = packing.local_shape[0] * packing.local_shape[1] // parts
            empty = torch.empty(rows, 0, self.routing.topk, dtype=self.routing.dtype, device=packing.device)
            run.chosen[chunk].append(
                torch.stack([chosen_experts[layer] for layer in layers], 1) if layers else empty
            )


def _check_routes(routing: Routing, micro_batches: Sequence[MicroBatch]) -> None:
    violations = [
        f"micro-batch {number}: {misfit}"
        for number, micro_batch in enumerate(micro_batches)
        if micro_batch.routes is not None
        for misfit in routing.find_misfits(micro_batch.routes, micro_batch.packing.padding.real_tokens)
    ]
    if violations:
        raise JobFailed(
            "the recorded expert routes do not fit this model. Record them again with this model:", violations
        )


@dataclass(frozen=True)
class RouterStages:
    """The layers with routers that each pipeline stage holds, in the order in which it stacks them."""

    layers: tuple[tuple[int, ...], ...]

    @classmethod
    def gather(cls, local_layers: Sequence[int], pp: ParallelGroup, routing: Routing) -> "RouterStages":
        """Return the stages of a model, gathered from all of them (every rank must call it).

        `local_layers`: this rank's layers.

        Raises JobFailed unless together they are the layers of `routing`, each once.
        """
        stage_layers: list[tuple[int, ...]] = [()] * pp.size
        dist.all_gather_object(stage_layers, tuple(local_layers), group=pp.group)
        if sorted(layer for stage in stage_layers for layer in stage) != list(routing.layers):
            raise JobFailed(
                f"Router replay: the recipe has experts in layers {list(routing.layers)}, but the pipeline"
                f" stages have routers in layers {[list(stage) for stage in stage_layers]}."
            )
        return cls(tuple(stage_layers))

    @property
    def max_layers(self) -> int:
        """The layers of the stage that has most."""
        return max(map(len, self.layers))

    def find_columns(self, layers: Sequence[int]) -> list[int]:
        """Return each layer's column in the concatenated stacks of all stages, padded to `max_layers`."""
        columns_by_layer = {
            layer: stage * self.max_layers + slot
            for stage, stage_layers in enumerate(self.layers)
            for slot, layer in enumerate(stage_layers)
        }
        return [columns_by_layer[layer] for layer in layers]


def gather_micro_batch_routes(
    local_choices: Sequence[Tensor],
    packings: Sequence[Packing],
    routing: Routing,
    stages: RouterStages,
    groups: Groups,
    tp: ParallelGroup | None,
) -> list[Routes]:
    """Return the routes of each micro-batch, whole and unpadded, the same on every rank of a model replica.

    `local_choices` are this rank's choices [t, L of this stage, k] for each micro-batch. `tp` is the tensor
    parallel axis under sequence parallelism, where its ranks hold different tokens. It takes one collective
    for each axis, for any number of layers and micro-batches.
    """
    sizes = [len(part) for part in local_choices]
    stack = torch.cat(list(local_choices))
    filled = stack.new_zeros(len(stack), stages.max_layers, routing.topk)
    filled[:, : stack.shape[1]] = stack
    gathered = filled.view(torch.uint8)  # not every collective backend has all integer types
    for axis in (tp, groups.cp, groups.pp):
        gathered = _stack_rank_tensors(gathered, axis)
    # [pp, cp, tp, t, most, k] -> [cp, tp, t, L, k]
    together = gathered.view(routing.dtype).permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
    together = together[:, :, :, stages.find_columns(routing.layers)]
    parts = together.split(sizes, dim=2)
    return [
        Routes(routing.layers, from_router_rows(part, packing))
        for part, packing in zip(parts, packings, strict=True)
    ]


def _stack_rank_tensors(x: Tensor, axis: ParallelGroup | None) -> Tensor:
    """Return [ranks, ...] from each rank's [...]."""
    if axis is None or axis.size == 1:
        return x[None]
    gathered = x.new_empty(axis.size * len(x), *x.shape[1:])  # gloo takes no other shape
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=axis.group)
    return gathered.view(axis.size, *x.shape)
