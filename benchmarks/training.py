"""What the bundle's loop costs over a bare megatron-core loop with the same model, facade, DDP, optimizer.

python -m benchmarks.training [--blocks N] [--steps N] [--recipe RECIPE --backend cuda [--set KEY=VALUE ...]]

Two equal models train in one process in turn, in blocks of A B B A: A through `training.loop` with its feed,
loss sums, stop requests and metrics, B through a plain loop over megatron's schedule, loss and optimizer. On
a CPU the CPU time is compared, on a GPU the time until the device has ended; the ratio is bare / bundle (1:
nothing lost). A block's order cancels a drift, and the median over the blocks, with its 95 % lower bound from
the order of the blocks alone, is not moved by the few that a neighbour on the same core disturbed: many short
blocks say more than a few long ones, although each then ends with a report.
"""

import argparse
import gc
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from bundle.planning import Plan, build_plan
from bundle.recipe import Recipe, load, loss_chunks
from bundle.transfers import copy_to_device
from bundle.worker import prepare_runtime

DEMO = ("parallel.ep=1", "train.global_batch_size=8")
ALIKE = (
    "train.eval_interval=0",
    "data.validation=0",
    "checkpoint.interval=0",
    "metrics.tensorboard=false",
    "optimizer.warmup_steps=0",
)


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=100, help="blocks of A B B A, at least 20")
    parser.add_argument("--steps", type=int, default=1, help="steps of each A and B")
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--backend", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--set", action="append", default=[], help="a key of the recipe")
    chosen = parser.parse_args()
    if chosen.blocks < 20:
        parser.error("--blocks: the bound needs at least 20")
    torch.set_num_threads(1)
    steps = (f"train.steps={chosen.steps}", f"train.log_interval={chosen.steps}")
    overrides = (*(DEMO if chosen.recipe == "demo" else ()), *ALIKE, *steps, *chosen.set)
    plan = build_plan(load(chosen.recipe, overrides), backend=chosen.backend, per_node=1)
    runtime, device = start_process(plan)
    with tempfile.TemporaryDirectory() as directory:
        bundle, bare = build_loops(plan.recipe, runtime, device, Path(directory))
        for _ in range(2):  # the first steps compile
            bundle(), bare()
        seconds = measure(bundle, bare, chosen.blocks, device)
    dist.destroy_process_group()
    print(json.dumps(report(seconds, chosen.steps), indent=2))


def start_process(plan: Plan) -> tuple[Any, torch.device]:
    """Make this process the only rank of a plan; return the backend's runtime and the device."""
    os.environ |= {variable.name: variable.value for variable in plan.environment}
    runtime = prepare_runtime(plan.patch_plan, plan.hardware.backend, plan.recipe)
    device: torch.device = runtime.select_device(0)
    dist.init_process_group(runtime.collectives, store=dist.HashStore(), rank=0, world_size=1)
    return runtime, device


def build_loops(
    recipe: Recipe, runtime: Any, device: torch.device, directory: Path
) -> tuple[Callable[[], None], Callable[[], None]]:
    """One block of each kind of training: (the bundle's, the bare one)."""
    from bundle import data
    from bundle.checkpoints.checkpoints import Checkpoints
    from bundle.checkpoints.directory import CheckpointDirectory
    from bundle.distributed.watchdog import Watchdog
    from bundle.distributed.world import StopRequest
    from bundle.engine import Engine
    from bundle.mcore import groups
    from bundle.runs.directory import RunDirectory
    from bundle.runs.metrics import JsonLines, MetricsDispatcher, Profiler, Speed
    from bundle.runs.progress import Progress
    from bundle.runs.session import Session
    from bundle.runs.stragglers import Stragglers
    from bundle.training import loop
    from bundle.training.loop import Batches, EarlyStopping

    with runtime.megatron_calls():
        state = groups.create_model_parallel_groups(recipe.parallel, seed=recipe.seed, timeout_seconds=60)
    feed = data.Loader(recipe, data.prepare(recipe, directory), 0, 1)
    batches = Batches(recipe, feed, state, device)
    engine = Engine(recipe, runtime, state, device)
    session = Session(
        recipe=recipe,
        engine=engine,
        directory=RunDirectory(directory),
        checkpoints=Checkpoints(CheckpointDirectory(directory / "checkpoints"), engine, keep=1),
        watchdog=Watchdog(3600, directory, 0, 0),
        metrics=MetricsDispatcher([JsonLines(directory / "metrics.jsonl")]),
        speed=Speed(recipe, device.type, device, dp=1),
        stragglers=Stragglers(0, device),
        profiler=Profiler(recipe, directory / "profile", 0),
        stop_request=StopRequest(device),
        progress=Progress(),
        identity={},
    )
    session._save = lambda: None  # type: ignore[method-assign]

    def bundle() -> None:
        session.progress = Progress()
        loop.train(session, batches, EarlyStopping(None))

    with mock.patch.object(loss_chunks, "_LEAST_LOGITS", math.inf):
        plain = Engine(recipe, runtime, state, device)
    del plain.models[-1].compute_language_model_loss  # the bundle's tap: the bare loop has none
    return bundle, lambda: train_bare(recipe, plain, feed)


def train_bare(recipe: Recipe, engine: Any, feed: Any) -> None:
    """A plain megatron-core loop: the schedule, the optimizer, and the loss read once at the end."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    (model,) = engine.chunks
    device = engine.device
    position_ids = torch.arange(recipe.data.sequence_length, device=device)[None]

    def forward_step(iterator: Any, chunk: torch.nn.Module) -> Any:
        batch = next(iterator)
        ids, labels, mask = (
            copy_to_device(tensor, device) for tensor in (batch.ids, batch.labels, batch.loss_mask)
        )
        output = chunk(ids, position_ids, None, labels=labels, loss_mask=mask)

        def loss(output: torch.Tensor) -> Any:
            total = (output.float() * mask).sum()
            return total, mask.sum().int(), {"loss": total.detach()}

        return output, loss

    for step in range(recipe.train.steps):
        batches = feed.read_training_step(step * recipe.train.global_batch_size)
        with engine.runtime.megatron_calls():
            model.train()
            model.zero_grad_buffer()
            engine.optimizer.zero_grad()
            losses = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(batches),
                model=model,
                num_microbatches=len(batches),
                seq_length=recipe.data.sequence_length,
                micro_batch_size=recipe.train.micro_batch_size,
                forward_only=False,
            )
            engine.optimizer.step()
            engine.scheduler.step(increment=1)
    assert math.isfinite(float(losses[-1]["loss"]))


def measure(
    a: Callable[[], None], b: Callable[[], None], blocks: int, device: torch.device
) -> list[tuple[float, float]]:
    """Seconds of both loops in each block of A B B A: of the CPU, or on a GPU until the device has ended."""

    def measure_seconds(loop: Callable[[], None]) -> float:
        gc.collect()  # else one loop pays for what the other left
        before = read_clock(device)
        loop()
        return read_clock(device) - before

    seconds = []
    for _ in range(blocks):
        first, second, third, fourth = (measure_seconds(loop) for loop in (a, b, b, a))
        seconds.append((first + fourth, second + third))
    return seconds


def read_clock(device: torch.device) -> float:
    """CPU seconds of this process; on a GPU seconds of the wall clock, once the device has ended."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def report(blocks: list[tuple[float, float]], steps: int) -> dict[str, float]:
    """The median ratio bare / bundle over the blocks, with its one-sided 95 % lower bound."""
    ratios = sorted(bare / ours for ours, bare in blocks)
    return {
        "blocks": len(blocks),
        "bundle_seconds_per_step": round(statistics.median(a for a, _ in blocks) / (2 * steps), 4),
        "bare_seconds_per_step": round(statistics.median(b for _, b in blocks) / (2 * steps), 4),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_lower_95": round(ratios[bound(len(ratios))], 4),
    }


def bound(count: int) -> int:
    """The index in the sorted sample that lies below the median of its distribution with 95 % confidence."""
    chances = accumulate(math.comb(count, below) / 2**count for below in range(count))
    return sum(1 for chance in chances if chance <= 0.05) - 1


if __name__ == "__main__":
    main()
