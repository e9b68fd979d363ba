"""The division of a device's memory between a trainer and a server of rollouts."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bundle.capabilities import EnvVariable
from bundle.errors import format_bytes
from bundle.planning.memory import HEADROOM, MemoryEstimate
from bundle.planning.problems import Problem, to_hardware_problem
from bundle.planning.rollout import (
    STATIC_POOL_OVERHEAD_BYTES,
    count_device_kv_cache_bytes,
    find_ipc_obstacle,
    has_colocated_servers,
)
from bundle.recipe import Recipe


class DeviceShare(NamedTuple):
    """The part of a device's memory that a server may use (mem_fraction_static): `chosen`, and its limits.

    `least` holds the weights, the longest sequence and `STATIC_POOL_OVERHEAD_BYTES`; `most` leaves
    the trainer its weights, gradients and optimizer. The cache is released while the trainer learns.
    """

    chosen: float
    least: float
    most: float
    device: int  # bytes of the device
    states: int  # bytes of the trainer while answers are sampled
    learning: int  # bytes of the trainer at its peak
    server: int  # bytes of the server's weights

    def find_problems(self) -> Iterator[Problem]:
        """Yield the problems of a share that does not fit."""
        key, states, device = "rl.rollout.mem_fraction_static", *map(format_bytes, (self.states, self.device))
        if self.least > self.most:
            yield to_hardware_problem(
                f"{key}: a device has {device}, too little for a trainer of {states} and a server with"
                f" {format_bytes(self.server)} of weights, its cache and overhead. Divide the trainer over"
                " more devices, or use servers elsewhere (rl.rollout.urls)."
            )
        elif not self.least <= self.chosen <= self.most:
            yield to_hardware_problem(
                f"{key}: {self.chosen:g} does not suit a device of {device} with a trainer of {states}. Set a"
                f" value from {self.least:g} to {self.most:g}."
            )


def compute_device_share(
    recipe: Recipe, stages: Sequence[MemoryEstimate], device: int | None
) -> DeviceShare | None:
    """Return the share of the server on each device; None without one, or where the device is not known."""
    if recipe.rl is None or not has_colocated_servers(recipe) or device is None or not stages:
        return None
    states, rollout = max(stage.states.device_total for stage in stages), stages[0].rollout
    learning = max(stage.states.device_total + stage.activations.total_peak for stage in stages)
    longest = count_device_kv_cache_bytes(recipe, recipe.data.sequence_length)
    most, usual = (
        math.floor(100 * (part * device - states - rollout.overhead + STATIC_POOL_OVERHEAD_BYTES) / device)
        / 100
        for part in (1, 1 - HEADROOM)
    )
    least = math.ceil(100 * (rollout.weights + longest + STATIC_POOL_OVERHEAD_BYTES) / device) / 100
    chosen = recipe.rl.rollout.mem_fraction_static or max(usual, min(least, most))
    return DeviceShare(chosen, least, most, device, states, learning, rollout.weights)


def find_ipc_transport_problems(
    recipe: Recipe, backend: str, environment: Sequence[EnvVariable]
) -> Iterator[Problem]:
    """Yield why a server cannot open the trainer's memory, where the recipe asks for it."""
    if recipe.rl is None or recipe.rl.rollout.transport != "ipc":
        return
    variables = {variable.name: variable.value for variable in environment}
    if obstacle := find_ipc_obstacle(backend, variables):
        yield to_hardware_problem(f"rl.rollout.transport: ipc is not possible with {obstacle}. Use files.")


def add_kv_cache(stages: Sequence[MemoryEstimate], share: DeviceShare | None) -> tuple[MemoryEstimate, ...]:
    """Return the estimates with the cache that a server of that share holds while answers are sampled."""
    if share is None:
        return tuple(stages)
    cache = max(0, int(share.chosen * share.device) - share.server - STATIC_POOL_OVERHEAD_BYTES)
    return tuple(stage._replace(rollout=stage.rollout._replace(transient=cache)) for stage in stages)
