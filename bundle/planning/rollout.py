"""Memory of a rollout engine on a device, and of the versions of the weights in files.

On the device it has weights, a cache of keys and values, and logits.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from bundle.architectures import Architecture
from bundle.architectures.tensors import Tensors
from bundle.planning.size import DTYPE_BYTES
from bundle.recipe import Recipe

# The most rows that `rollouts.transformers` samples at once, and logits that it converts to float64 at once.
MOST_ROWS, FLOAT64_LOGITS = 256, 2**24
OLDEST_SGLANG = "0.5.16"
SHARED_MEMORY = Path("/dev/shm")
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# How many versions of the weights lie in the folder of a sync at once.
_KEPT_VERSIONS = 2


# Beside weights and cache (`benchmarks.gpu.turns`): contexts, kernels and communicators of a server, of the
# process of its checksums, and of the trainer.
_ALL_PROCESSES_OVERHEAD_BYTES = 37 * 2**27
# The part of these bytes that a server takes from its share of the device, which leaves less for its cache.
STATIC_POOL_OVERHEAD_BYTES = 7 * 2**27


class RolloutBytes(NamedTuple):
    """Bytes of a rank: of the weights, and the larger peak of a sync and of sampling (`transient`).

    `overhead` is the memory that the processes of a device with a server use besides their tensors.
    """

    weights: int = 0
    transient: int = 0
    overhead: int = 0


def estimate_rollout(recipe: Recipe, world_size: int) -> RolloutBytes:
    """Return the bytes of the engine on each rank; 0 where the recipe samples nothing."""
    rl, architecture = recipe.rl, recipe.architecture
    if rl is None or rl.rollout.path is not None:
        return RolloutBytes()
    size = DTYPE_BYTES[recipe.model.dtype]
    weights = _count_published_parameters(replace(architecture, mtp_layers=0)) * size
    if rl.rollout.engine == "sglang":  # servers of the run stand on the trainer's devices
        if not has_colocated_servers(recipe):
            return RolloutBytes()
        return RolloutBytes(-(-weights // rl.rollout.tp), overhead=_ALL_PROCESSES_OVERHEAD_BYTES)
    rows = min(MOST_ROWS, -(-rl.prompts_per_step // world_size) * rl.num_generations)
    if rl.evaluation is not None:  # the number of its questions is not known yet
        rows = MOST_ROWS
    cache = count_device_kv_cache_bytes(recipe, rows * recipe.data.sequence_length)
    logits = rows * architecture.vocab_size * size + min(rows * architecture.vocab_size, FLOAT64_LOGITS) * 16
    # A sync builds the next weights while the old ones still exist.
    return RolloutBytes(weights, max(weights, cache + logits))


def has_colocated_servers(recipe: Recipe) -> bool:
    """Return whether the run starts servers, which share its devices."""
    rollout = recipe.rl.rollout if recipe.rl else None
    return rollout is not None and rollout.engine == "sglang" and not rollout.urls and rollout.path is None


def find_ipc_obstacle(backend: str, environment: Mapping[str, str]) -> str | None:
    """Return what keeps a server from opening the trainer's memory; None where nothing does."""
    if backend != "cuda":
        return f"backend: {backend}"
    segments = "expandable_segments:True"
    names = (name for name in _ALLOCATOR_VARIABLES if segments in environment.get(name, ""))
    return next((f"{name}={segments}" for name in names), None)


def choose_weight_transport(
    recipe: Recipe, backend: str, environment: Mapping[str, str]
) -> Literal["files", "ipc"]:
    """Return how weights come to the servers of a run."""
    assert recipe.rl is not None
    settings = recipe.rl.rollout
    if settings.transport is not None:
        return settings.transport
    has_one_device = has_colocated_servers(recipe) and settings.replicas * settings.tp == 1
    return "ipc" if has_one_device and find_ipc_obstacle(backend, environment) is None else "files"


def count_device_kv_cache_bytes(recipe: Recipe, tokens: int) -> int:
    """Return the bytes of the keys and values of this number of tokens on a device."""
    assert recipe.rl is not None
    values = tokens * _count_cache_values_per_token(recipe.architecture) * DTYPE_BYTES[recipe.model.dtype]
    return -(-values // (recipe.rl.rollout.tp if has_colocated_servers(recipe) else 1))


def count_weights_folder_bytes(recipe: Recipe) -> int:
    """Return the bytes of the versions of the weights that are in the folder of a sync at once."""
    return _KEPT_VERSIONS * _count_published_parameters(recipe.architecture) * DTYPE_BYTES[recipe.model.dtype]


def _count_published_parameters(architecture: Architecture) -> int:
    """Return the number of values of all published tensors."""
    tensors = Tensors(architecture)
    return sum(math.prod(shape) for tensor in tensors for _, shape in tensor.list_published_shapes())


def _count_cache_values_per_token(architecture: Architecture) -> int:
    """Return the number of values in transformers' cache for one token, in all layers together."""
    mla = architecture.mla
    if mla is not None:  # the compressed keys and values, and the rotary key that all heads share
        return architecture.num_layers * (mla.kv_lora_rank + mla.qk_pos_emb_head_dim)
    layers = architecture.num_layers - sum(architecture.delta_net.layers if architecture.delta_net else ())
    return layers * 2 * architecture.num_query_groups * architecture.kv_channels
