"""Models and optimizer in megatron's distributed checkpoint format, which any layout can load.

States of any other form are written and read as megatron's own callers do.
"""

import inspect
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from bundle.mcore import filter_keywords, unpickling
from bundle.mcore.gpt import set_chunk_if_interleaved
from bundle.mcore.groups import get_dp_cp_group

# Forms that any layout can load; a release writes the first that it has. 0.15 introduced the first one.
_PREFERRED_SHARDING_TYPES = ("fully_reshardable", "fully_sharded_model_space")


def read_megatron_version() -> str:
    """Return the version that megatron-core states; a checkpoint records the version that wrote it."""
    return str(megatron.core.__version__)


def choose_sharding_type() -> str:
    """Return the form in which this release writes optimizer state, loadable at any layout."""
    newer = getattr(DistributedOptimizer, "checkpoint_fully_reshardable_formats", ())
    return (
        _PREFERRED_SHARDING_TYPES[0]
        if _PREFERRED_SHARDING_TYPES[0] in newer
        else _PREFERRED_SHARDING_TYPES[1]
    )


def save(directory: Path, models: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> None:
    """Write models and optimizer into `directory`, which exists and is empty; all ranks call it.

    Raise what megatron raises. When a rank cannot write, all ranks raise (0.12: rank 0 alone).
    """
    with use_result_file(directory):
        dist_checkpointing.save(
            _collect_state(models, optimizer, choose_sharding_type()),
            str(directory),
            **_select_megatron_writer(),
        )


class AsyncSave:
    """A checkpoint that a process of this rank is writing while training goes on."""

    def __init__(
        self, directory: Path, models: Sequence[torch.nn.Module], optimizer: MegatronOptimizer
    ) -> None:
        """Start to write the present state; all ranks call it."""
        with use_result_file(directory):
            request = dist_checkpointing.save(
                _collect_state(models, optimizer, choose_sharding_type()),
                str(directory),
                async_sharded_save=True,
                **_select_megatron_writer(),
            )
        self._queue = AsyncCallsQueue(**filter_keywords(AsyncCallsQueue.__init__, persistent=False))
        self._queue.schedule_async_request(request)

    def is_finished(self, *, wait: bool = False) -> bool:
        """Return whether all ranks have written all of it; a collective. Raise what writing raised."""
        return bool(self._queue.maybe_finalize_async_calls(blocking=wait))


def load(
    directory: Path, models: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, sharding_type: str
) -> None:
    """Read models and optimizer from `directory`, which was written with `sharding_type`.

    Raise what megatron and torch raise, and UnpicklingError for a file that holds more than data.
    """
    loaded = _load(directory, models, _collect_state(models, optimizer, sharding_type, is_loading=True))
    with _remove_steps_while_loading(optimizer):
        for index, part in enumerate(_list_optimizers(optimizer)):
            tensors = loaded["optimizer"][index]["param_state"]
            if not isinstance(part, DistributedOptimizer):
                _fill_optimizer_state(part, tensors, loaded["optimizer_step"])
                continue
            part_state = part.state_dict()
            for group in part_state["optimizer"]["param_groups"]:
                group["step"] = loaded["optimizer_step"]
            part.load_state_dict(
                part_state | {"param_state": tensors, "param_state_sharding_type": sharding_type}
            )


def load_weights(directory: Path, models: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> None:
    """Read the models alone; a new optimizer takes their weights. Raise what `load` raises."""
    _load(directory, models, _build_sharded_weights(models, _build_content_metadata(choose_sharding_type())))
    optimizer.reload_model_params()


def _load(directory: Path, models: Sequence[torch.nn.Module], state: dict[str, Any]) -> dict[str, Any]:
    """Fill the models with the tensors of `state` in the directory, and return all of that state."""
    with unpickling.restrict_to_data():
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(directory))
        for name, model in _name_models(models):
            model.load_state_dict(loaded[name])
    return loaded


def _build_content_metadata(sharding_type: str) -> dict[str, Any]:
    """Return the metadata that tells megatron's modules and optimizers the requested form."""
    return {
        "distrib_optim_sharding_type": sharding_type,
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "dp_cp_group": get_dp_cp_group(),
    }


def _build_sharded_weights(models: Sequence[torch.nn.Module], content: dict[str, Any]) -> dict[str, Any]:
    """Return the models' tensors, each with its place in the whole."""
    # Names as Megatron-LM gives them, so that its tools read our checkpoints.
    weights = {}
    for number, (name, model) in enumerate(_name_models(models)):
        set_chunk_if_interleaved(
            number if len(models) > 1 else None
        )  # 0.12 counts layers from those of the one it is in
        weights[name] = model.sharded_state_dict(metadata=dict(content))
    return weights


def _collect_state(
    models: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer,
    sharding_type: str,
    *,
    is_loading: bool = False,
) -> dict[str, Any]:
    """Return the tensors of models and optimizer, each with its place in the whole.

    The optimizer keeps nothing but its tensors and its step. The settings of its parameter groups come from
    the recipe. The number of groups and optimizers differs by layout (experts have their own optimizer only
    with ep or etp above 1), and megatron cannot read across that.
    """
    _allocate_zero_state(optimizer)
    content = _build_content_metadata(sharding_type)
    state = _build_sharded_weights(models, content)
    parameters = inspect.signature(DistributedOptimizer.sharded_state_dict).parameters
    options = {"metadata": content} if "metadata" in parameters else {"sharding_type": sharding_type}
    parts, step = {}, 0
    for index, part in enumerate(_list_optimizers(optimizer)):
        if isinstance(part, DistributedOptimizer):
            sharded_state = part.sharded_state_dict(state, is_loading=is_loading, **options)
            # Before 0.15 each tensor comes with torch's step, which has no place in the whole.
            tensors = {
                name: {kind: tensor for kind, tensor in by_kind.items() if kind != "step"}
                for name, by_kind in sharded_state["param_state"].items()
            }
            groups = sharded_state["optimizer"]["param_groups"]
        else:
            tensors = _shard_undivided_state_by_weight(part, state)
            groups = [*part.optimizer.param_groups, *part.optimizer.state.values()]
        parts[index] = {"param_state": tensors}
        step = max([step, *(int(group.get("step") or 0) for group in groups)])
    return {**state, "optimizer": parts, "optimizer_step": step}


def build_sharded_tensor(
    name: str, parameter: torch.Tensor, cut: tuple[int, int, int] | None, replica: tuple[int, int, int]
) -> Any:
    """Return a parameter with its place in the whole, for a state that is written or read.

    `cut`: the dimension, the number of this part, and the number of parts; None: it is the whole. Among equal
    parts the one whose `replica` is (0, 0, 0) is written.
    """
    offsets = () if cut is None else (cut,)
    return dist_checkpointing.ShardedTensor.from_rank_offsets(name, parameter, *offsets, replica_id=replica)


def _shard_undivided_state_by_weight(
    optimizer: MegatronOptimizer, model_state: dict[str, Any]
) -> dict[int, dict[str, Any]]:
    """Return the state of an optimizer that is whole on data-parallel ranks, cut as its weights are."""
    weights, _ = extract_sharded_tensors_and_factories(model_state)
    sharded_weights = {id(sharded.data): sharded for sharded in nested_values(weights)}
    return {
        number: {
            kind: make_sharded_optimizer_tensor(
                sharded_weights[id(weight)], tensor, f"optimizer.state.{kind}"
            )
            for kind, tensor in tensors.items()
        }
        for number, (weight, tensors) in enumerate(_iterate_unsharded_weight_states(optimizer))
    }


def _iterate_unsharded_weight_states(
    optimizer: MegatronOptimizer,
) -> Iterator[tuple[torch.nn.Parameter, dict[str, torch.Tensor]]]:
    """Yield each weight of an undivided optimizer and its tensors: an fp32 copy of bf16, its state."""
    pairs = zip(
        getattr(optimizer, "float16_groups", ()),
        getattr(optimizer, "fp32_from_float16_groups", ()),
        strict=True,
    )
    weights = {
        id(copy): tensor for group, copies in pairs for tensor, copy in zip(group, copies, strict=True)
    }
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            copy = {"fp32_param": parameter} if id(parameter) in weights else {}
            states = optimizer.optimizer.state[parameter].items()
            yield (
                weights.get(id(parameter), parameter),
                copy | {kind: tensor for kind, tensor in states if kind != "step"},
            )


def _fill_optimizer_state(
    optimizer: MegatronOptimizer, tensors: dict[int, dict[str, torch.Tensor]], step: int
) -> None:
    """Put back what `_shard_undivided_state_by_weight` named, and the step where the algorithm counts it."""
    for number, (_, states) in enumerate(_iterate_unsharded_weight_states(optimizer)):
        for kind, tensor in states.items():
            tensor.data.copy_(tensors[number][kind])
    step_tensors = [state["step"] for state in optimizer.optimizer.state.values() if "step" in state]
    for step_tensor in step_tensors:
        step_tensor.fill_(step)
    for group in () if step_tensors else optimizer.optimizer.param_groups:
        group["step"] = step


def _name_models(models: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    return [("model" if len(models) == 1 else f"model{i}", model) for i, model in enumerate(models)]


def _select_megatron_writer() -> dict[str, Any]:
    """Return the option that makes 0.17 and later write without nvidia-resiliency-ext."""
    return filter_keywords(dist_checkpointing.save, async_strategy="mcore")


def _list_optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers that are chained; one without parameters on this rank has no state."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]


def _allocate_zero_state(optimizer: MegatronOptimizer) -> None:
    """Give torch's Adam, and undivided optimizers, the state that they would create in their first step.

    Megatron asks a new optimizer for its step before it saves or loads anything. It fails where torch's Adam
    (used without Transformer Engine and apex) has none yet: the optimizer is new, or every update was skipped
    so far.
    """
    for part in _list_optimizers(optimizer):
        inner, config = part.optimizer, part.config
        torchs_adam = isinstance(inner, torch.optim.Adam | torch.optim.AdamW)
        if inner.state or (isinstance(part, DistributedOptimizer) and not torchs_adam):
            continue
        momentum = ("momentum_buffer",) if config.sgd_momentum else ()
        names = momentum if config.optimizer == "sgd" else ("exp_avg", "exp_avg_sq")
        for group in inner.param_groups:
            for parameter in group["params"]:
                zeros = {name: torch.zeros_like(parameter.data) for name in names}
                inner.state[parameter] = ({"step": torch.tensor(0.0)} if torchs_adam else {}) | zeros


@contextmanager
def _remove_steps_while_loading(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Take `step` out of torch's Adam while megatron fills in its tensors, and put it back.

    Megatron copies every tensor of the state from the checkpoint, where there is no step (KeyError). It also
    gives all parameters the same step tensor, which every parameter would then advance.
    """
    taken: list[tuple[dict[str, Any], torch.Tensor]] = []

    def take(inner: torch.optim.Optimizer) -> None:
        for state in inner.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                taken.append((state, state.pop("step")))

    hooks = [part.optimizer.register_load_state_dict_post_hook(take) for part in _list_optimizers(optimizer)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for state, step in taken:
        state["step"] = step.clone()


class _FileResultQueue:
    """A queue of one result, in a file, between this process and the ones that megatron writes with."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def put(self, result: Any) -> None:
        self._path.write_bytes(pickle.dumps(result))

    def get_nowait(self) -> Any:
        try:
            result = pickle.loads(self._path.read_bytes())
        except FileNotFoundError:
            raise Empty from None
        self._path.unlink()
        return result

    get = get_nowait


@contextmanager
def use_result_file(directory: Path) -> Iterator[None]:
    """Make megatron's writers report by a file.

    Megatron's own queue is a server process per rank. Each one starts Python and torch again (seconds), needs
    a main module that can be imported twice, and stays behind when its rank is killed.
    """
    filesystem_async._results_queue = _FileResultQueue(directory.with_name(f".results-{dist.get_rank()}"))
    try:
        yield
    finally:
        filesystem_async._results_queue = None


def write(state: dict[str, Any], directory: Path) -> None:
    """Write a state of sharded tensors and plain values into an existing, empty directory."""
    dist_checkpointing.save(state, str(directory))


def write_in_parallel(state: dict[str, Any], directory: Path) -> None:
    """Write as `write` does; every rank writes its share of what all ranks hold, Megatron-LM's default."""
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy())
    dist_checkpointing.save(state, str(directory), strategy)


def build_flat_replicated_tensor(key: str, tensor: torch.Tensor, rank: int) -> Any:
    """Return a tensor that all ranks hold, as one flat range of itself.

    Optimizer state has this form up to 0.15.
    """
    part = slice(0, tensor.numel())
    return dist_checkpointing.ShardedTensor.from_rank_offsets_flat(
        key, tensor.flatten(), tuple(tensor.shape), flattened_range=part, replica_id=rank
    )


def build_optimizer_state(
    model: torch.nn.Module, optimizer: Any, sharding_type: str | None, *, is_loading: bool = False
) -> Any:
    """Return the optimizer's sharded state in one of megatron's forms; None: in its default form."""
    options = {} if sharding_type is None else {"metadata": {"distrib_optim_sharding_type": sharding_type}}
    return optimizer.sharded_state_dict(model.sharded_state_dict(), is_loading=is_loading, **options)


def read(state: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the state of a directory, resharded to what `state` asks for, with the plain values."""
    loaded: dict[str, Any] = dist_checkpointing.load(state, str(directory))
    return loaded


def read_common(directory: Path) -> dict[str, Any]:
    """Return the plain values alone."""
    common: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(directory))
    return common
