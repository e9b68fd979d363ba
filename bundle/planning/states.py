"""Bytes of parameters, gradients and optimizer state on every rank, as megatron-core allocates them.

The distributed optimizer keeps parameters in one buffer and gradients in another, both whole on every
data-parallel rank, and divides the rest: with bf16 an fp32 copy of the weights, and Adam's two moments in
fp32 (DistributedOptimizer._build_model_and_main_param_groups).
"""

from dataclasses import fields
from itertools import accumulate
from typing import Self

from bundle.capabilities import LayerTraits
from bundle.frozen import frozen
from bundle.planning.buffers import Buffer, lay_out
from bundle.planning.code import EXPERT_GROUPS_BY_ETP, Code
from bundle.planning.parameters import parameters
from bundle.planning.placement import Chunk, Placement
from bundle.recipe import Recipe

FP32, BF16 = 4, 2


@frozen
class States:
    """Bytes of one rank. `counters` are the scalar step counts of torch's own Adam."""

    parameters: int = 0
    gradients: int = 0
    master: int = 0
    moments: int = 0
    counters: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, item.name) for item in fields(self))


@frozen
class Ledger:
    """The buffers of every stage, from which any rank's bytes follow."""

    placement: Placement
    stages: tuple[tuple[tuple[Buffer, Buffer], ...], ...]  # stage, chunk, (dense, expert)
    bf16: bool
    layers: LayerTraits

    @classmethod
    def of(cls, recipe: Recipe, placement: Placement, code: Code, layers: LayerTraits) -> Self:
        """The buffers of a recipe on this code of megatron-core, with a backend's layers."""
        stages = tuple(
            tuple(_buffers(recipe, placement, chunk, code, layers) for chunk in chunks)
            for chunks in placement.stages
        )
        return cls(placement, stages, recipe.model.dtype == "bf16", layers)

    def rank(self, rank: int) -> States:
        """The bytes of one rank."""
        pp = self.placement.axis("pp")
        stage, inside = pp.index(rank), rank % pp.stride
        *_, kept = (kept for first, *kept in self._steps(stage) if first <= inside)
        return self._states(self._elements(stage), *kept)

    def largest(self, stage: int) -> States:
        """The bytes of the rank of a stage that needs most: the padding falls on the others."""
        elements = self._elements(stage)
        every = (self._states(elements, *kept) for _, *kept in self._steps(stage))
        return max(every, key=lambda states: states.total)

    def _elements(self, stage: int) -> int:
        """The sizes of a stage's buffers together, padding included."""
        return sum(buffer.elements for buffers in self.stages[stage] for buffer in buffers)

    def _steps(self, stage: int) -> list[tuple[int, int, int]]:
        """(rank, elements, tensors) that ranks of a stage keep optimizer state for, from that rank on."""
        # Ranks that differ in tp alone keep the same share of dense buffers; of experts', in etp or ep.
        strides = self.placement.axis("cp").stride, self.placement.axis("expert-dp").stride
        changes = {0: (0, 0)}
        for buffers in self.stages[stage]:
            for buffer, stride in zip(buffers, strides, strict=True):
                for share, elements, tensors in buffer.changes():
                    before = changes.get(share * stride, (0, 0))
                    changes[share * stride] = before[0] + elements, before[1] + tensors
        kept = accumulate(
            (changes[rank] for rank in sorted(changes)), lambda a, b: (a[0] + b[0], a[1] + b[1])
        )
        there = self.placement.axis("pp").stride
        return [(rank, *sizes) for rank, sizes in zip(sorted(changes), kept, strict=True) if rank < there]

    def _states(self, elements: int, own: int, tensors: int) -> States:
        return States(
            parameters=elements * (BF16 if self.bf16 else FP32),
            gradients=elements * FP32,
            master=own * FP32 if self.bf16 else 0,
            moments=own * 2 * FP32,
            counters=tensors * FP32 if self.layers.adam_counters else 0,
        )


def _buffers(
    recipe: Recipe, placement: Placement, chunk: Chunk, code: Code, layers: LayerTraits
) -> tuple[Buffer, Buffer]:
    """(dense, expert) buffers of one chunk; either may be empty."""
    parallel, ranks = recipe.parallel, placement.size("dp") * placement.size("cp")
    apart = parallel.ep > 1 or (parallel.etp != parallel.tp and code.has(EXPERT_GROUPS_BY_ETP))
    all_of_them = parameters(recipe.architecture, parallel, chunk, layers)
    experts = [p for p in all_of_them if p.expert and apart]
    dense = [p for p in all_of_them if not (p.expert and apart)]
    size = _bucket_size(recipe, placement, chunk)
    return lay_out(dense, ranks, size), lay_out(experts, placement.size("expert-dp"), size)


def _bucket_size(recipe: Recipe, placement: Placement, chunk: Chunk) -> int | None:
    """Elements of a bucket: only the first chunk of the first stage has several, and only with overlap.

    Elsewhere the pipeline hides the reduction anyway (DistributedDataParallel.__init__).
    """
    options = recipe.distributed
    if not options.overlap_grad_reduce or chunk.stage > 0 or chunk.index > 0:
        return None
    return options.bucket_size or max(40_000_000, 1_000_000 * placement.size("dp"))
