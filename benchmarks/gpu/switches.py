"""Each fused kernel of a backend on and off: the losses of 50 steps must be equal within bf16's rounding.

python -m benchmarks.gpu.switches [--only SWITCH...] [--steps N] [--at-once N] [--recipe RECIPE] [--set ...]

One process trains with everything that the plan chooses, one more does the same again, and one for each
switch trains without it; all begin with the same weights and read the same data. One process changes each
of the first weights within half of its last digit: its losses differ as much as rounding allows. `--at-once`
of the processes share the device. Ends with 1 where a run fails, or where a loss of the main task or of MTP
differs by more than `FACTOR` times the largest difference after that change.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.training import start_process
from bundle.planning import build_plan
from bundle.recipe import load, loss_chunks

FACTOR = 2.0  # One run with changed weights is a sample: a second one may differ more.
RECIPE = str(Path(__file__).parent / "latent.yaml")
_ALIKE = (
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
    "optimizer={lr: 2e-5, min_lr: 2e-5, warmup_steps: 0}",
)
AGAIN = "nothing"  # off: the same run again
CHANGED = "nothing, weights changed by rounding"


def turn_field_off(name: str) -> Callable[[Any], None]:
    """Return what sets a field of megatron's TransformerConfig to False; it exits if the field is not set."""

    def change(runtime: Any) -> None:
        build = runtime.build_config_options

        def build_without(recipe: Any) -> dict[str, Any]:
            options = build(recipe)
            if not options.get(name):
                sys.exit(f"{name} is off in this plan")
            return {**options, name: False}

        runtime.build_config_options = build_without

    return change


def add_gradients_apart(runtime: Any) -> None:
    """Let every layer, and the head, compute a weight's gradient before it is added to the others."""
    turn_field_off("gradient_accumulation_fusion")(runtime)
    type(runtime).add_weight_gradient = None


def use_megatron_loss(_: Any) -> None:
    """Let megatron compute the loss of all tokens at once."""
    vars(loss_chunks)["_LEAST_LOGITS"] = math.inf


def unset_grouped_launch(_: Any) -> None:
    """Let Transformer Engine start the product of each expert by itself."""
    if os.environ.pop("NVTE_USE_CUTLASS_GROUPED_GEMM", None) is None:
        sys.exit("NVTE_USE_CUTLASS_GROUPED_GEMM is not set by this plan")


SWITCHES: Mapping[str, Callable[[Any], None]] = {
    AGAIN: lambda _: None,
    "fused rotary positions": turn_field_off("apply_rope_fusion"),
    "fused activation": turn_field_off("bias_activation_fusion"),
    "gradients added in products": add_gradients_apart,
    "fused sorting of tokens": turn_field_off("moe_permute_fusion"),
    "kept logits": use_megatron_loss,
    "experts in one launch": unset_grouped_launch,
}


def change_weights_by_rounding(engine: Any) -> None:
    """Multiply each weight in fp32 by 1 and at most half a last digit, at random, and round it again."""
    import torch

    with torch.no_grad():
        for model in engine.models:
            for weight in model.parameters():
                half_digit = torch.finfo(weight.dtype).eps / 2
                factor = 1 + (2 * torch.rand_like(weight, dtype=torch.float32) - 1) * half_digit
                weight.copy_(weight.float() * factor)
    engine.optimizer.reload_model_params()


def main() -> int:
    """Print a row for each switch; return 1 where a run fails or leaves the first one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(SWITCHES), choices=list(SWITCHES))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        help="processes that share the device; one of `latent.yaml` takes 34 GiB",
    )
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument("--set", action="append", default=[], help="a key of the recipe")
    parser.add_argument("--without", help="train without this switch in this process, and print its losses")
    options = parser.parse_args()
    if options.without is not None:
        overrides = (*_ALIKE, f"train.steps={options.steps}", *options.set)
        print(json.dumps(train(load(options.recipe, overrides), options.without)))
        return 0
    print(f"| switched off | largest difference of a loss in {options.steps} steps | step | last losses |")
    print("|---|---|---|---|", flush=True)
    is_right = True
    with ThreadPoolExecutor(options.at_once) as pool:
        runs = pool.map(partial(run, options=options), (AGAIN, CHANGED, *options.only))
        reference, bound = next(runs), 0.0
        if reference is None:
            return 1
        for name, losses in zip((CHANGED, *options.only), runs, strict=True):
            if losses is None:
                is_right = False
                continue
            gap, step = find_largest_gap(losses, reference)
            if name == CHANGED:
                bound = FACTOR * gap
            is_right &= gap <= bound < math.inf
            last = ", ".join(f"{loss:.4f}" for loss in losses[-1])
            print(f"| {name} | {gap:.4f} | {step} | {last} |", flush=True)
    return int(not is_right)


def run(name: str, options: argparse.Namespace) -> list[list[float]] | None:
    """Return the losses of each step without a switch, from a process of its own; None where it fails."""
    command = [sys.executable, "-m", "benchmarks.gpu.switches", "--without", name]
    command += ["--steps", str(options.steps), "--recipe", options.recipe]
    command += [word for override in options.set for word in ("--set", override)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        print(f"FAILED without {name}:", ended.stderr[-2000:], sep="\n", flush=True)
        return None
    losses: list[list[float]] = json.loads(ended.stdout.splitlines()[-1])
    return losses


def train(recipe: Any, without: str) -> list[list[float]]:
    """Return the main loss and the MTP losses of each step without a switch, or with changed weights."""
    plan = build_plan(recipe, per_node=1)
    runtime, device = start_process(plan)
    if without != CHANGED:
        SWITCHES[without](runtime)
    from bundle import data
    from bundle.engine import Engine
    from bundle.mcore import groups
    from bundle.training.loop import Batches

    recipe, losses = plan.recipe, []
    with tempfile.TemporaryDirectory() as directory:
        with runtime.megatron_calls():
            state = groups.create_model_parallel_groups(recipe.parallel, seed=recipe.seed, timeout_seconds=60)
        batches = Batches(
            recipe, data.Loader(recipe, data.prepare(recipe, Path(directory)), 0, 1), state, device
        )
        engine = Engine(recipe, runtime, state, device)
        if without == CHANGED:
            change_weights_by_rounding(engine)
        for step in range(recipe.train.steps):
            engine.forward_backward(batches.build_training_batches(step * recipe.train.global_batch_size))
            engine.step_optimizer()
            seen = engine.take_losses()
            losses.append([seen.main, *seen.mtp])
    return losses


def find_largest_gap(losses: list[list[float]], reference: list[list[float]]) -> tuple[float, int]:
    """Return the largest difference of a loss and its step, from 1; infinity for what is not a number."""
    gaps = []
    for step, rows in enumerate(zip(losses, reference, strict=True), 1):
        for a, b in zip(*rows, strict=True):
            gaps.append((abs(a - b) if math.isfinite(a - b) else math.inf, step))
    return max(gaps, key=itemgetter(0))


if __name__ == "__main__":
    sys.exit(main())
