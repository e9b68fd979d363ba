"""Megatron's random states: one per kind of parallel region, for dropout and recomputation."""

import torch
from megatron.core import tensor_parallel


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
