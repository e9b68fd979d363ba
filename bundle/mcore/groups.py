"""The process groups of one model as plain numbers, and the random states that differ along them."""

import hashlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import ProcessGroup

from bundle.recipe import Parallel

# Megatron adds the tensor-parallel rank to the seed: the seeds of stages are further apart than that.
_STAGE_SEED_STRIDE = 100
# Random states besides megatron's, and the offsets of their seeds. The first is the same on the ranks that
# cut the same experts and see the same tokens; the others differ between the ranks that cut a layer.
_SAME_EXPERTS, _SAME_EXPERTS_SEED = "same-experts-rng", 2**20
_CUT_LAYERS, _CUT_LAYERS_SEED = "cut-layers-rng", 2**21
_CUT_EXPERTS, _CUT_EXPERTS_SEED = "cut-experts-rng", 2**22


@dataclass(frozen=True)
class ParallelGroup:
    """One parallel dimension as this rank sees it."""

    size: int
    rank: int
    group: ProcessGroup


@dataclass(frozen=True)
class Groups:
    """The position of this rank in every dimension.

    `dp` does not count context parallel ranks; `vpp` is 1 without interleaving.
    """

    tp: ParallelGroup
    pp: ParallelGroup
    cp: ParallelGroup
    ep: ParallelGroup
    etp: ParallelGroup
    dp: ParallelGroup
    vpp: int

    def is_first_stage(self, chunk: int) -> bool:
        """Return whether model chunk `chunk` of this rank holds the embedding."""
        return self.pp.rank == 0 and chunk == 0

    def is_last_stage(self, chunk: int) -> bool:
        """Return whether model chunk `chunk` of this rank holds the head."""
        return self.pp.rank == self.pp.size - 1 and chunk == self.vpp - 1


def create_model_parallel_groups(layout: Parallel, *, seed: int, timeout_seconds: int) -> Groups:
    """Create the model-parallel state with its seeds, and return its groups; torch.distributed must be up."""
    options: dict[str, Any] = {}
    if layout.mtp_rank != layout.pp - 1:
        # The ranks with the embedding or the MTP layers' copy of it: the last stage has neither.
        options["get_embedding_ranks"] = lambda ranks: [ranks[0], ranks[layout.mtp_rank]]
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=max(1, -(-timeout_seconds // 60)),
        **options,
    )
    seed_model_parallel_rng(seed)
    return get_current_groups(layout.vpp or 1)


def get_current_groups(vpp: int = 1) -> Groups:
    """Return the groups that megatron-core holds now; `vpp` is the number of model chunks per rank."""

    def to_parallel_group(group: ProcessGroup) -> ParallelGroup:
        return ParallelGroup(group.size(), group.rank(), group)

    return Groups(
        tp=to_parallel_group(parallel_state.get_tensor_model_parallel_group()),
        pp=to_parallel_group(parallel_state.get_pipeline_model_parallel_group()),
        cp=to_parallel_group(parallel_state.get_context_parallel_group()),
        ep=to_parallel_group(parallel_state.get_expert_model_parallel_group()),
        etp=to_parallel_group(parallel_state.get_expert_tensor_parallel_group()),
        dp=to_parallel_group(parallel_state.get_data_parallel_group()),
        vpp=vpp,
    )


def destroy_model_parallel_groups() -> None:
    """Remove the groups, after which another layout can be set up in the same processes."""
    parallel_state.destroy_model_parallel()
    # 0.12 keeps this value: a rank that held position embeddings would look for its group in the next layout.
    parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None


def get_dp_cp_group() -> ProcessGroup:
    """Return the group over which gradients of dense parameters are reduced: dp x cp."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def get_expert_dp_group() -> ProcessGroup:
    """Return the group of the ranks that hold the same part of the same experts."""
    return parallel_state.get_expert_data_parallel_group()


def get_tp_cp_group() -> ProcessGroup:
    """Return the group of the ranks with the parts of one micro-batch under sequence parallelism: tp x cp."""
    return parallel_state.get_tensor_and_context_parallel_group()


def seed_model_parallel_rng(seed: int, *, completed_steps: int = 0) -> None:
    """Seed megatron's random states of this rank, for a run that goes on after `completed_steps`.

    Each kind of parallel region has one, for dropout and recomputation. They differ between pipeline stages,
    whose layers would otherwise all drop the same values. They also differ by the step, and the masks of the
    first steps do not come again.
    """
    if completed_steps:
        digest = hashlib.sha256(f"{seed} after {completed_steps}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big")
    stage = parallel_state.get_pipeline_model_parallel_rank()
    stage_seed = seed + _STAGE_SEED_STRIDE * stage
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    expert_tensor_ranks = parallel_state.get_expert_tensor_parallel_world_size()
    cut_expert_rank = expert_rank * expert_tensor_ranks + parallel_state.get_expert_tensor_parallel_rank()
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.add(_SAME_EXPERTS, stage_seed + _SAME_EXPERTS_SEED + expert_rank)
    tracker.add(_CUT_LAYERS, stage_seed + _CUT_LAYERS_SEED + tensor_rank)
    tracker.add(_CUT_EXPERTS, stage_seed + _CUT_EXPERTS_SEED + cut_expert_rank)


def fork_dropout_rng(*, is_expert: bool, is_same: bool) -> AbstractContextManager[None]:
    """Return a random state for dropout in a layer that ranks of tp, or of etp for an expert, have cut.

    `is_same`: whether these ranks see the same input and must draw the same values. Recomputation and
    checkpoints restore the states. Under sequence parallelism layers run in a fork of megatron's own state.
    Up to 0.15 a fork of that state inside it does not advance it: every step would draw the same values.
    """
    if is_expert:
        name = _SAME_EXPERTS if is_same else _CUT_EXPERTS
    else:
        name = tensor_parallel.random.get_data_parallel_rng_tracker_name() if is_same else _CUT_LAYERS
    forked: AbstractContextManager[None] = tensor_parallel.get_cuda_rng_tracker().fork(name)
    return forked


def get_rng_tracker_states() -> dict[str, torch.Tensor]:
    """Return the state of each named generator, as bytes on the CPU."""
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        name: (state.get_state() if isinstance(state, torch.Generator) else state).cpu()
        for name, state in tracked.items()
    }


def set_rng_tracker_states(states: dict[str, torch.Tensor]) -> None:
    """Put back what `get_rng_tracker_states` returned."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    present = tracker.get_states()
    for name, state in states.items():
        if isinstance(present.get(name), torch.Generator):
            present[name].set_state(state)
        else:
            present[name] = state
    tracker.set_states(present)
