"""Bytes of parameters, gradients and optimizer state on every rank, as megatron-core allocates them.

The distributed optimizer keeps parameters in one buffer and gradients in another, both whole on every
data-parallel rank, and divides the rest: with bf16 an fp32 copy of the weights, and Adam's two moments in
fp32 (DistributedOptimizer._build_model_and_main_param_groups).
"""

from dataclasses import fields
from typing import Self

from packaging.version import Version

from bundle.backends.layers import Layers
from bundle.frozen import frozen
from bundle.planning.buffers import Buffer, lay_out
from bundle.planning.parameters import parameters
from bundle.planning.placement import Chunk, Placement
from bundle.recipe import Recipe

FP32, BF16 = 4, 2

# From 0.19 experts whose tensor parallel size is not the dense one get the experts' groups even at ep 1;
# before, their gradients are reduced like dense ones (tensor_parallel/layers.py, use_expert_pgs).
EXPERT_GROUPS_BY_ETP = Version("0.19")


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

    def __add__(self, other: "States") -> "States":
        return States(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@frozen
class Ledger:
    """The buffers of every stage, from which any rank's bytes follow."""

    placement: Placement
    stages: tuple[tuple[tuple[Buffer, Buffer], ...], ...]  # stage, chunk, (dense, expert)
    bf16: bool
    layers: Layers

    @classmethod
    def of(cls, recipe: Recipe, placement: Placement, release: Version, layers: Layers) -> Self:
        """The buffers of a recipe on a release of megatron-core, with a backend's layers."""
        stages = tuple(
            tuple(_buffers(recipe, placement, chunk, release, layers) for chunk in chunks)
            for chunks in placement.stages
        )
        return cls(placement, stages, recipe.model.dtype == "bf16", layers)

    def rank(self, rank: int) -> States:
        """The bytes of one rank."""
        return self._at(self.placement.axis("pp").index(rank), *self._shares(rank))

    def largest(self, stage: int) -> States:
        """The bytes of the rank of a stage that needs most: the padding falls on the others."""
        ranks = self.placement.axis("pp").stride
        shares = {self._shares(rank) for rank in range(stage * ranks, (stage + 1) * ranks)}
        return max((self._at(stage, *share) for share in shares), key=lambda states: states.total)

    def _shares(self, rank: int) -> tuple[int, int]:
        """Which share of the dense and of the expert buffers a rank keeps optimizer state for."""
        cp, dp = self.placement.axis("cp"), self.placement.axis("dp")
        return cp.size * dp.index(rank) + cp.index(rank), self.placement.axis("expert-dp").index(rank)

    def _at(self, stage: int, dense_rank: int, expert_rank: int) -> States:
        total = States()
        for dense, expert in self.stages[stage]:
            total += self._buffer(dense, dense_rank) + self._buffer(expert, expert_rank)
        return total

    def _buffer(self, buffer: Buffer, rank: int) -> States:
        if not buffer.spans:
            return States()
        elements, pieces = buffer.owned[rank]
        return States(
            parameters=buffer.elements * (BF16 if self.bf16 else FP32),
            gradients=buffer.elements * FP32,
            master=elements * FP32 if self.bf16 else 0,
            moments=elements * 2 * FP32,
            counters=pieces * FP32 if self.layers.adam_counters else 0,
        )


def _buffers(
    recipe: Recipe, placement: Placement, chunk: Chunk, release: Version, layers: Layers
) -> tuple[Buffer, Buffer]:
    """(dense, expert) buffers of one chunk; either may be empty."""
    parallel, ranks = recipe.parallel, placement.size("dp") * placement.size("cp")
    apart = parallel.ep > 1 or (parallel.etp != parallel.tp and release >= EXPERT_GROUPS_BY_ETP)
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
