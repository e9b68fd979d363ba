"""One rank that trains one case through the real engine on the real data feed.

python -m benchmarks.gpu.rank CASE BACKEND DIRECTORY   (under torchrun)
"""

import argparse
import importlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import CASES, Case, plan_of
from benchmarks.gpu.run import Run
from bundle.distributed import world
from bundle.launch.rendezvous import discover
from bundle.planning import Plan
from bundle.planning.size import compute_model_size
from bundle.recipe import Recipe
from bundle.worker import prepare_runtime

TIMEOUT = timedelta(seconds=120)
PACKAGES = ("torch", "megatron-core", "transformer-engine")


def main(case: Case, backend: str, directory: Path) -> None:
    with prepared(plan_of(case, backend)) as (runtime, device, rank):
        with first_weights_kept() if case.keeps_first_weights else _as_it_is():
            run = train(case, backend, directory, runtime, device)
        if rank == 0:
            run.write(directory / f"{run.name}.json")


@contextmanager
def prepared(plan: Plan) -> Iterator[tuple[Any, torch.device, int]]:
    """The planned backend's runtime, this rank's device and number, inside the process group of all ranks."""
    rendezvous = discover(os.environ)
    assert rendezvous.rank is not None and rendezvous.local_rank is not None, "started by torchrun only"
    meeting = world.open_store(rendezvous, TIMEOUT)
    runtime = prepare_runtime(plan.patch_plan, plan.hardware.backend)
    device = runtime.select_device(rendezvous.local_rank)
    world.initialize(rendezvous, meeting, runtime.collectives, TIMEOUT)
    yield runtime, device, rendezvous.rank
    world.destroy_process_groups()


def grouped(recipe: Recipe, runtime: Any) -> Any:
    """Megatron's process groups for the recipe's layout."""
    from bundle.mcore import groups

    with runtime.megatron_calls():
        return groups.create_model_parallel_groups(
            recipe.parallel, seed=recipe.seed, timeout_seconds=int(TIMEOUT.total_seconds())
        )


def train(case: Case, backend: str, directory: Path, runtime: Any, device: torch.device) -> Run:
    """Trains `case` and says what happened in each step."""
    from bundle import data
    from bundle.engine import Engine
    from bundle.training.loop import Batches

    recipe = case.recipe(backend)
    state = grouped(recipe, runtime)
    feed = data.Loader(recipe, data.prepare(recipe, directory / "data"), state.dp.rank, state.dp.size)
    batches = Batches(recipe, feed, state, device)
    engine = Engine(recipe, runtime, state, device)
    losses, norms, seconds = [], [], []
    for step in range(case.steps(backend)):
        begin = time.perf_counter()
        engine.forward_backward(batches.build_training_batches(step * recipe.train.global_batch_size))
        norms.append(engine.step_optimizer().grad_norm)
        seen = engine.take_losses()
        losses.append([seen.main, *seen.mtp])
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    lengths = [recipe.data.sequence_length] * recipe.train.global_batch_size
    return Run(
        name=case.named(backend),
        losses=losses,
        grad_norms=norms,
        seconds=seconds,
        tokens=sum(lengths),
        flops=compute_model_size(recipe.architecture).count_training_flops(lengths),
        peak_bytes=torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
        planned_bytes=max(stage.peak_bytes for stage in plan_of(case, backend).memory),
        versions={name: _version(name) for name in PACKAGES} | {"device": _device(device)},
    )


@contextmanager
def first_weights_kept() -> Iterator[None]:
    """Megatron's schedules do not reach the layers that keep FP8 copies of their weights."""
    module = importlib.import_module("megatron.core.transformer.module").MegatronModule
    original = module.set_is_first_microbatch
    module.set_is_first_microbatch = lambda self: None
    try:
        yield
    finally:
        module.set_is_first_microbatch = original


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("backend", choices=("cpu", "cuda"))
    parser.add_argument("directory", type=Path)
    given = parser.parse_args(sys.argv[1:])
    main(CASES[given.case], given.backend, given.directory)
