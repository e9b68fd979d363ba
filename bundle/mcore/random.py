"""Megatron's random states: one per kind of parallel region, for dropout and recomputation."""

import hashlib

import torch
from megatron.core import parallel_state, tensor_parallel

# Megatron tells tensor-parallel ranks apart by adding their number: stages are further apart than those.
_STAGE = 100


def begin(seed: int, *, after: int = 0) -> None:
    """Begins the random states of this rank, for a run that goes on after so many steps.

    They differ between pipeline stages, whose layers would all drop the same values; and after another step
    they are others, so that the masks of the first steps do not come again.
    """
    if after:
        digest = hashlib.sha256(f"{seed} after {after}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big")
    stage = parallel_state.get_pipeline_model_parallel_rank()
    tensor_parallel.model_parallel_cuda_manual_seed(seed + _STAGE * stage)


def states() -> dict[str, torch.Tensor]:
    """Returns the state of each named generator, as bytes on the CPU."""
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        name: (state.get_state() if isinstance(state, torch.Generator) else state).cpu()
        for name, state in tracked.items()
    }


def set_states(states: dict[str, torch.Tensor]) -> None:
    """Puts back what `states` returned."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    present = tracker.get_states()
    for name, state in states.items():
        if isinstance(present.get(name), torch.Generator):
            present[name].set_state(state)
        else:
            present[name] = state
    tracker.set_states(present)
