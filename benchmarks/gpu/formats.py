"""The speed of `mcore-bundle train` in bf16 and in FP8, with the micro-batch size that the plan chooses.

python -m benchmarks.gpu.formats [--only gqa latent] [--scalings SCALING...] [--set KEY=VALUE ...]

Trains `gqa.yaml` and `latent.yaml` on one GPU with `train.micro_batch_size: auto`. A step lasts from the end
of the last one to its end; the time is the median of the steps from the sixth on. Ends with 1 where a run
fails, where bf16 has less TFLOP/s than `LEAST`, or where no FP8 scaling has the multiple of bf16's speed.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.peers import RunFailed, get_step_seconds, train_by_bundle

STEPS = 16
HERE = Path(__file__).parent


class Least(NamedTuple):
    """The least TFLOP/s of a model in bf16, and the least speed in FP8 as a multiple of that in bf16."""

    bf16: float
    fp8_ratio: float


LEAST: Mapping[str, Least] = {"gqa": Least(545, 1.33), "latent": Least(400, 1.1)}
_ALIKE = (
    f"train.steps={STEPS + 4}",
    "train.micro_batch_size=auto",
    "train.log_interval=1",
    "train.eval_interval=0",
    "checkpoint.interval=0",
    "metrics.tensorboard=false",
)


def main() -> int:
    """Print a row for each run; return 1 where a run fails or is too slow."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(LEAST), choices=list(LEAST))
    parser.add_argument(
        "--scalings",
        nargs="+",
        default=["tensorwise", "blockwise", "delayed"],
        help="default: all three. With model.lora, leave delayed out",
    )
    parser.add_argument("--set", action="append", default=[], help="a key of the recipe, for all runs")
    options = parser.parse_args()
    print("| model | format | ms a step | TFLOP/s | GiB | micro-batch | loss of step 1, last |")
    print("|---|---|---|---|---|---|---|", flush=True)
    is_right = True
    for model in options.only:
        speeds = {scaling: measure(model, scaling, options.set) for scaling in ("bf16", *options.scalings)}
        is_right &= is_fast_enough(LEAST[model], speeds)
    return int(not is_right)


def measure(model: str, scaling: str, overrides: Sequence[str]) -> float:
    """Train a model in a format, print its row, and return TFLOP/s; 0 for a run that fails."""
    fp8 = [] if scaling == "bf16" else [f"model.fp8={{scaling: {scaling}}}"]
    arguments = [str(HERE / f"{model}.yaml")]
    for override in (*_ALIKE, *fp8, *overrides):
        arguments += ["--set", override]
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = train_by_bundle(arguments, Path(folder), STEPS)
        except RunFailed as error:
            print(f"FAILED {model} {scaling}: {error}", flush=True)
            return 0.0
    speed: float = run["flops"] / get_step_seconds(run) / 1e12
    print_row(model, scaling, run, speed)
    return speed


def is_fast_enough(least: Least, speeds: Mapping[str, float]) -> bool:
    """Return whether all runs ended, bf16 is fast enough, and so is the best FP8 scaling, if any."""
    fp8 = [speed for scaling, speed in speeds.items() if scaling != "bf16"]
    has_fast_fp8 = not fp8 or max(fp8) >= least.fp8_ratio * speeds["bf16"]
    return all(speeds.values()) and speeds["bf16"] >= least.bf16 and has_fast_fp8


def print_row(model: str, scaling: str, run: dict[str, Any], speed: float) -> None:
    """Print a row of the table."""
    print(
        f"| {model} | {scaling} | {get_step_seconds(run) * 1000:.0f} | {speed:.0f}"
        f" | {run['peak_bytes'] / 2**30:.1f} | {run['micro_batch_size']}"
        f" | {run['losses'][0]:.3f}, {run['losses'][-1]:.3f} |",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
