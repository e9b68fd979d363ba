"""The distributed optimizer's state in distributed checkpoints: saved, loaded by another, and compared."""

from typing import Any

import torch

from bundle.mcore import checkpoints, optimization
from bundle.mcore.groups import Groups
from bundle.verification.bench import Bench
from bundle.verification.numbers import Numbers, gap
from bundle.verification.tiny import DENSE, chunk, recipe

_STEPS, _BUCKETS = 3, "dp_reshardable"


def default_form(bench: Bench) -> float:
    """Every tensor of an optimizer whose form nobody asked for, saved and loaded."""
    with bench.layout() as groups:
        model, optimizer = _trained(bench, groups, _STEPS)
        directory = bench.directory / "default"
        directory.mkdir()
        saved = checkpoints.optimizer_state(model, optimizer, None)
        kept = _tensors(saved)
        checkpoints.write({"optimizer": saved}, directory)
        other, resumed = _trained(bench, groups, 1)
        empty = checkpoints.optimizer_state(other, resumed, None, loading=True)
        return gap(_tensors(checkpoints.read({"optimizer": empty}, directory)["optimizer"]), kept)


def _tensors(state: Any, path: str = "") -> Numbers:
    """The tensors of a state and the data of its shards, by their place in it."""
    data = getattr(state, "data", state)
    if torch.is_tensor(data):
        return {path: data.detach().clone()} if data.ndim else {}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {name: x for key, value in items for name, x in _tensors(value, f"{path}.{key}").items()}


def steps(bench: Bench) -> float:
    """Moments of an optimizer saved by buckets, and how many steps it has taken."""
    with bench.layout() as groups:
        model, optimizer = _trained(bench, groups, _STEPS)
        directory = bench.directory / "steps"
        directory.mkdir(exist_ok=True)
        checkpoints.write({"optimizer": checkpoints.optimizer_state(model, optimizer, _BUCKETS)}, directory)
        other, resumed = _trained(bench, groups, 1)
        empty = checkpoints.optimizer_state(other, resumed, _BUCKETS, loading=True)
        resumed.load_state_dict(checkpoints.read({"optimizer": empty}, directory)["optimizer"])
        return gap(_states(resumed), _states(optimizer))


def _trained(bench: Bench, groups: Groups, steps: int) -> tuple[torch.nn.Module, Any]:
    """A tiny model and its optimizer after some steps of drawn gradients."""
    # In fp32 what is loaded into is a view of weights that want a gradient, which is refused
    job, model = recipe(DENSE, groups, dtype="bf16"), chunk(bench, groups, DENSE, dtype="bf16")
    optimizer = optimization.optimizer(job, optimization.data_parallel(job, model.config, [model]))
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        for parameter in model.parameters():
            vars(parameter)["main_grad"].copy_(torch.randn(parameter.shape, generator=generator))
        optimizer.step()
    return model, optimizer


def _states(optimizer: Any) -> Numbers:
    held = [state for each in optimizer.chained_optimizers for state in each.optimizer.state.values()]
    return {f"{i} {name}": x.clone() for i, state in enumerate(held) for name, x in state.items()}
