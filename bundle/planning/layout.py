"""The layout of a job over its ranks: the ranks of each group, and the layers of each stage.

The order of ranks is megatron-core's default in every release from 0.12 to 0.19, tp-cp-ep-dp-pp
(parallel_state.RankGenerator). `Parallel.compute_stages` says what a stage holds.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from bundle.architectures import Architecture
from bundle.environment import MOST_RANKS
from bundle.errors import UsageError
from bundle.recipe import Recipe
from bundle.recipe.stages import ChunkContents


@dataclass(frozen=True, slots=True)
class ModelChunk:
    """One model chunk of a pipeline stage: without interleaving each stage has one."""

    stage: int
    index: int
    layers: tuple[int, ...]  # numbers in the whole decoder, from 0
    embedding: bool
    head: bool
    mtp_layers: int
    final_norm: bool  # behind the last layer of the decoder: the head's, where no MTP layers read it first
    losses: int  # that the head has to compute, its own and one of each MTP layer; 0 without it

    @property
    def has_mtp_embedding_copy(self) -> bool:
        """True if the chunk holds a second embedding, which its MTP layers read and the first stage owns."""
        return self.mtp_layers > 0 and not self.embedding


@dataclass(frozen=True, slots=True)
class RankAxis:
    """One kind of process group: `size` ranks, each `stride` after the one before."""

    name: str
    size: int
    stride: int

    def list_group_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that share a group with `rank`, in the group's order."""
        first = rank - self.find_rank_in_group(rank) * self.stride
        return tuple(first + i * self.stride for i in range(self.size))

    def find_rank_in_group(self, rank: int) -> int:
        """Return the position of `rank` in its group."""
        return rank // self.stride % self.size


class RankLayout(NamedTuple):
    """The layout of a job on `world` ranks.

    Dense tensors see tp, cp, dp and pp; experts see etp, ep, expert dp and pp.
    """

    world: int
    axes: tuple[RankAxis, ...]
    stages: tuple[tuple[ModelChunk, ...], ...]
    microbatches: int  # of one step, on every data-parallel rank; rounded up where the batch does not divide

    def find_axis(self, name: str) -> RankAxis:
        """Return the axis called `name`: tp, cp, dp, pp, etp, ep or expert-dp."""
        return next(axis for axis in self.axes if axis.name == name)

    def find_axis_size(self, name: str) -> int:
        """Return the number of ranks in a group of that axis."""
        return self.find_axis(name).size

    def find_chunks(self, rank: int) -> tuple[ModelChunk, ...]:
        """Return the model chunks that `rank` holds."""
        return self.stages[self.find_axis("pp").find_rank_in_group(rank)]

    @property
    def bubble(self) -> float:
        """The pipeline bubble: the share of a step that a stage waits, 0 without stages.

        With p stages, m micro-batches and v chunks a stage it is (p - 1) / (m v + p - 1), by 1F1B and its
        interleaved form. Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
        Clusters Using Megatron-LM", 2021, section 2.2, which divides by the work alone. Chunks count as
        equally long, and transfers as free. With uneven stages the shorter ones wait longer.
        """
        waits, chunks = self.find_axis_size("pp") - 1, len(self.stages[0])
        return waits / (self.microbatches * chunks + waits)

    def iterate_chunks(self) -> Iterator[ModelChunk]:
        """Return an iterator over the chunks of every stage."""
        return (chunk for chunks in self.stages for chunk in chunks)


def can_lay_out(recipe: Recipe, world: int) -> bool:
    """Return whether `world` ranks have a layout, even if the batch does not divide by it."""
    return world <= MOST_RANKS and recipe.parallel.is_minimal_world_multiple(world)


def build_rank_layout(recipe: Recipe, world: int) -> RankLayout:
    """Return the layout of a recipe on `world` ranks. Raise UsageError with every reason against it."""
    parallel = recipe.parallel
    if not can_lay_out(recipe, world):
        raise UsageError(
            f"recipe {recipe.name} does not fit {world} ranks", recipe.find_layout_violations(world)
        )
    dp = parallel.compute_dp(world)
    dense = _build_axes(("tp", parallel.tp), ("cp", parallel.cp), ("dp", dp), ("pp", parallel.pp))
    expert = _build_axes(
        ("etp", parallel.etp), ("ep", parallel.ep), ("expert-dp", parallel.compute_expert_dp(world))
    )
    microbatches = -(-recipe.train.global_batch_size // (recipe.train.micro_batch_size_or_one * dp))
    stage_contents = parallel.compute_stages(recipe.architecture.num_layers, recipe.architecture.mtp_layers)
    assert stage_contents is not None, "the rules of a recipe have asked"
    return RankLayout(
        world, (*dense, *expert), _build_stages(recipe.architecture, stage_contents), microbatches
    )


def build_single_chunk(architecture: Architecture) -> ModelChunk:
    """Return one chunk with all of a model."""
    contents = ChunkContents(architecture.num_layers, True, architecture.mtp_layers, True)
    ((chunk,),) = _build_stages(architecture, ((contents,),))
    return chunk


def _build_axes(*sizes: tuple[str, int]) -> list[RankAxis]:
    axes, stride = [], 1
    for name, size in sizes:
        axes.append(RankAxis(name, size, stride))
        stride *= size
    return axes


def _build_stages(
    architecture: Architecture, stages: tuple[tuple[ChunkContents, ...], ...]
) -> tuple[tuple[ModelChunk, ...], ...]:
    """Return the chunks of each stage.

    Layers are numbered round by round; a round has one chunk of each stage.
    """
    layer_counts = [contents.layers for chunks in zip(*stages, strict=True) for contents in chunks]
    starts = [0, *itertools.accumulate(layer_counts)]
    depth = architecture.mtp_layers

    def build_chunk(stage: int, index: int, contents: ChunkContents) -> ModelChunk:
        first = starts[index * len(stages) + stage]
        layers = tuple(range(first, first + contents.layers))
        return ModelChunk(
            stage=stage,
            index=index,
            layers=layers,
            embedding=contents.embedding,
            head=contents.head,
            mtp_layers=contents.mtp_layers,
            final_norm=architecture.num_layers - 1 in layers if depth else contents.head,
            losses=1 + depth if contents.head else 0,
        )

    return tuple(
        tuple(build_chunk(stage, index, contents) for index, contents in enumerate(chunks))
        for stage, chunks in enumerate(stages)
    )
