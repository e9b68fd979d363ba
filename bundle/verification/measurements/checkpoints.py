"""Distributed checkpoints: torch's and numpy's newer releases, pickles, and the optimizer's state."""

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from bundle.mcore import checkpoints, optimization
from bundle.replacements import checkpoints as replacements
from bundle.verification.numbers import DENSE_HF_CONFIG, Bench, BenchLayout, Numbers, measure_gap


def measure_round_trip(bench: Bench) -> float:
    """Measure the weights of a model after they are saved, zeroed and loaded."""
    directory = bench.directory / "checkpoint"
    directory.mkdir()
    with bench.open_layout() as layout:
        model = layout.build_chunk(DENSE_HF_CONFIG)
        before = _copy_weights(model)
        checkpoints.write({"model": model.sharded_state_dict(), "step": 3}, directory)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        loaded = checkpoints.read({"model": model.sharded_state_dict()}, directory)
        model.load_state_dict(loaded["model"])
        assert loaded["step"] == 3, f"common state came back as {loaded['step']}"
        return measure_gap(_copy_weights(model), before)


def measure_parallel_write_round_trip(bench: Bench) -> float:
    """Measure weights and a flat range that two ranks hold, after a round trip; each rank writes a part."""
    directory = bench.directory / "checkpoint"
    directory.mkdir(exist_ok=True)
    rank = dist.get_rank()
    numbers = torch.arange(12.0).reshape(3, 4)
    with bench.open_layout() as layout:
        model = layout.build_chunk(DENSE_HF_CONFIG)
        shard = checkpoints.build_flat_replicated_tensor("numbers", numbers, rank)
        checkpoints.write_in_parallel({"model": model.sharded_state_dict(), "numbers": shard}, directory)
        rows, columns = shard.local_coordinates()
        assert (rows * 4 + columns).tolist() == list(range(12)), f"coordinates {rows}, {columns}"
        with torch.no_grad():
            before = _copy_weights(model)
            for parameter in model.parameters():
                parameter.zero_()
        empty = checkpoints.build_flat_replicated_tensor("numbers", torch.zeros_like(numbers), rank)
        loaded = checkpoints.read({"model": model.sharded_state_dict(), "numbers": empty}, directory)
        model.load_state_dict(loaded["model"])
        seen = {**_copy_weights(model), "numbers": loaded["numbers"].reshape(3, 4)}
        return measure_gap(seen, {**before, "numbers": numbers})


def measure_checkpoint_code(bench: Bench) -> float:
    """Return 0 if code in a checkpoint's common state was refused and honest state still loads, else 1."""
    witness = bench.directory / "it-ran"
    hostile = _write_common_only_checkpoint(bench.directory / "hostile", {"step": _HostileCode(witness)})
    honest = _write_common_only_checkpoint(
        bench.directory / "honest", {"step": 3, "args": argparse.Namespace(lr=1.0)}
    )
    refused = False
    try:
        checkpoints.read_common(hostile)
    except Exception as error:  # noqa: BLE001  megatron may wrap the refusal in a type of its own
        refused = "Weights only load failed" in str(error)
    fine = checkpoints.read_common(honest)["step"] == 3
    return 0.0 if refused and fine and not witness.exists() else 1.0


def _write_common_only_checkpoint(directory: Path, state: dict[str, Any]) -> Path:
    """Write a checkpoint with nothing but common state, in the format to 0.17; return its directory."""
    directory.mkdir()
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    common = {"common_backend": "torch", "common_backend_version": 1}
    (directory / "metadata.json").write_text(json.dumps(backend | common))
    torch.save(state, directory / "common.pt")
    return directory


class _HostileCode:
    """An object that makes a directory when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.witness),)


def _copy_weights(model: torch.nn.Module) -> Numbers:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


_STEPS, _BUCKETS = 3, "dp_reshardable"


def measure_default_optimizer_format(bench: Bench) -> float:
    """Measure every tensor of an optimizer after a round trip in the form that nobody chose."""
    with bench.open_layout() as layout:
        model, optimizer = _step_tiny_model_randomly(layout, _STEPS)
        directory = bench.directory / "default"
        directory.mkdir()
        saved = checkpoints.build_optimizer_state(model, optimizer, None)
        saved_tensors = _collect_tensors(saved)
        checkpoints.write({"optimizer": saved}, directory)
        other_model, resumed = _step_tiny_model_randomly(layout, 1)
        empty = checkpoints.build_optimizer_state(other_model, resumed, None, is_loading=True)
        return measure_gap(
            _collect_tensors(checkpoints.read({"optimizer": empty}, directory)["optimizer"]), saved_tensors
        )


def _collect_tensors(state: Any, path: str = "") -> Numbers:
    """Return the tensors of a state and the data of its shards, by their place in it."""
    data = getattr(state, "data", state)
    if torch.is_tensor(data):
        return {path: data.detach().clone()} if data.ndim else {}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {name: x for key, value in items for name, x in _collect_tensors(value, f"{path}.{key}").items()}


def measure_dp_reshardable_optimizer_state(bench: Bench) -> float:
    """Measure the moments and the step counts of an optimizer after a round trip by buckets."""
    with bench.open_layout() as layout:
        model, optimizer = _step_tiny_model_randomly(layout, _STEPS)
        directory = bench.directory / "steps"
        directory.mkdir(exist_ok=True)
        checkpoints.write(
            {"optimizer": checkpoints.build_optimizer_state(model, optimizer, _BUCKETS)}, directory
        )
        other_model, resumed = _step_tiny_model_randomly(layout, 1)
        empty = checkpoints.build_optimizer_state(other_model, resumed, _BUCKETS, is_loading=True)
        resumed.load_state_dict(checkpoints.read({"optimizer": empty}, directory)["optimizer"])
        return measure_gap(_collect_states(resumed), _collect_states(optimizer))


def measure_device_optimizer_gather(bench: Bench) -> float:
    """Measure an optimizer's state gathered by the device's group, against gloo's on the host.

    The gap is also large where a gather brings too many elements at a time.
    """
    limit = 1000  # elements; a bucket of the tiny model has more
    with bench.open_layout() as layout:
        _, optimizer = _step_tiny_model_randomly(layout, _STEPS)
        (part,) = optimizer.chained_optimizers
        expected = part.get_parameter_state_dp_zero(use_gloo_comm=True, return_on_all_ranks=True)
        with mock.patch.object(replacements, "MAX_GATHER_ELEMENTS", limit), _record_gathers() as sizes:
            gathered = part.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
        gap = measure_gap(_collect_tensors(gathered), _collect_tensors(expected))
        return max(gap, max(sizes) / limit if max(sizes) > limit else 0.0)


@contextmanager
def _record_gathers() -> Iterator[list[int]]:
    """Yield a list that gets the number of elements that each gather of tensors brings to a rank."""
    sizes: list[int] = []
    all_gather, all_gather_into_tensor = dist.all_gather, dist.all_gather_into_tensor

    def record_list(gathered: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        sizes.append(sum(tensor.numel() for tensor in gathered))
        return all_gather(gathered, *args, **kwargs)

    def record_tensor(gathered: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(gathered.numel())
        return all_gather_into_tensor(gathered, *args, **kwargs)

    with (
        mock.patch.object(dist, "all_gather", record_list),
        mock.patch.object(dist, "all_gather_into_tensor", record_tensor),
    ):
        yield sizes


def _step_tiny_model_randomly(layout: BenchLayout, steps: int) -> tuple[torch.nn.Module, Any]:
    """Return a tiny model and its optimizer after some steps with drawn gradients."""
    # In fp32 the load would write into views of weights that want a gradient, which torch refuses
    job, model = (
        layout.build_recipe(DENSE_HF_CONFIG, dtype="bf16"),
        layout.build_chunk(DENSE_HF_CONFIG, dtype="bf16"),
    )
    optimizer = optimization.build_optimizer(job, optimization.wrap_data_parallel(job, model.config, [model]))
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        for parameter in model.parameters():
            vars(parameter)["main_grad"].copy_(torch.randn(parameter.shape, generator=generator))
        optimizer.step()
    return model, optimizer


def _collect_states(optimizer: Any) -> Numbers:
    states = [state for chained in optimizer.chained_optimizers for state in chained.optimizer.state.values()]
    return {f"{i} {name}": x.clone() for i, state in enumerate(states) for name, x in state.items()}
