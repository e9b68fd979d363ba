"""CPU seconds of one GRPO run by phase: `python -m benchmarks.rl`.

Runs the recipe grpo-arithmetic-cpu in this process, and counts where its CPU time goes: the engine's updates,
the sampling with the rollout engine's forward passes, and everything else (questions, judging, advantages,
micro-batches, weight sync, files, metrics). Ends with 1 where everything else takes more than 5 %.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bundle.launch import job as job_file
from bundle.planning import build_plan
from bundle.recipe import load
from bundle.worker import prepare_runtime

OTHER_SHARE = 0.05


def main() -> None:
    """Train, print the seconds and shares of the phases as JSON, and judge the share of everything else."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, help="updates; without it, those of the recipe")
    parser.add_argument("--packed", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    overrides = [f"train.steps={chosen.steps}"] * (chosen.steps is not None)
    overrides += ["data.packed=true", "train.micro_batch_size=1", "data.sequence_length=4096"] * chosen.packed
    with tempfile.TemporaryDirectory() as directory:
        seconds, total = run(load("grpo-arithmetic-cpu", overrides), Path(directory) / "run")
    seconds["everything else"] = total - sum(seconds.values())
    shares = {name: round(value / total, 4) for name, value in seconds.items()}
    print(
        json.dumps({"cpu_seconds": {k: round(v, 2) for k, v in seconds.items()}, "shares": shares}, indent=2)
    )
    sys.exit(shares["everything else"] > OTHER_SHARE)


def run(recipe: Any, directory: Path) -> tuple[dict[str, float], float]:
    """Return the CPU seconds of the phases `engine` and `sampling`, and those of the loop with everything."""
    plan = build_plan(recipe, backend="cpu", per_node=1)
    job = job_file.from_plan(plan, directory)
    assert job.patches is not None
    runtime = prepare_runtime(job.patches, "cpu", recipe)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from bundle.distributed.watchdog import Watchdog
    from bundle.engine import Engine
    from bundle.rl import loop, trainer
    from bundle.rollouts.transformers import TransformersRollout

    seconds: dict[str, float] = defaultdict(float)

    def measure(owner: Any, method: str, phase: str) -> None:
        original: Callable[..., Any] = getattr(owner, method)

        @wraps(original)
        def call_and_measure(*args: Any, **keywords: Any) -> Any:
            started = time.process_time()
            try:
                return original(*args, **keywords)
            finally:
                seconds[phase] += time.process_time() - started

        setattr(owner, method, call_and_measure)

    for method in ("forward_backward", "step", "compute_log_probs"):
        measure(Engine, method, "engine")
    measure(TransformersRollout, "generate", "sampling")
    total: dict[str, float] = defaultdict(float)
    original = loop.train

    def train_and_measure(policy_trainer: Any) -> None:
        started = time.process_time()
        original(policy_trainer)
        total["loop"] = time.process_time() - started

    loop.train = train_and_measure  # type: ignore[assignment]
    with Watchdog(3600, directory.parent, 0, 0) as watchdog:
        trainer.run(job, runtime, torch.device("cpu"), watchdog)
    dist.destroy_process_group()
    return dict(seconds), total["loop"]


if __name__ == "__main__":
    main()
