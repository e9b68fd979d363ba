"""GRPO on this machine, seed by seed: `python -m benchmarks.grpo`, which `make grpo` runs.

Trains the recipe grpo-arithmetic-cpu by `mcore-bundle train` and prints one JSON object for each seed. It has
the held-out accuracy before the first rollout and at the end, the last loss of multi-token prediction divided
by the first, and the largest mismatch between rollout engine and trainer. It has the CPU seconds of all
processes and the wall-clock seconds as well. Ends with 1 where a bound is not met.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# name: (bound, whether the value must be below it; else at least it)
BOUNDS = {
    "accuracy_before": (0.4, True),
    "accuracy": (0.85, False),
    "mtp_loss_ratio": (0.7, True),
    "mismatch_k3": (1e-7, True),
    "mismatch_log_prob": (1e-4, True),
    "cpu_seconds": (300.0, True),
    "seconds": (600.0, True),
}
MEAN_ACCURACY = 0.9


def main() -> None:
    """Train each seed, print its numbers, and compare them with the bounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="grpo-arithmetic-cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    chosen = parser.parse_args()
    failures = []
    accuracies = []
    for seed in chosen.seeds:
        with tempfile.TemporaryDirectory() as directory:
            values = train(chosen.recipe, seed, Path(directory) / "run")
        print(json.dumps({"seed": seed, **values}), flush=True)
        failures += [f"seed {seed}: {name} is {values[name]:.4g}" for name in find_failures(values)]
        accuracies.append(values["accuracy"])
    mean = sum(accuracies) / len(accuracies)
    if mean < MEAN_ACCURACY:
        failures.append(f"the mean accuracy is {mean:.4g}")
    print(json.dumps({"mean_accuracy": mean, "failures": failures}))
    sys.exit(bool(failures))


def train(recipe: str, seed: int, directory: Path) -> dict[str, float]:
    """Train one seed into `directory` and return its numbers by the names of BOUNDS."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-m", "bundle", "train", recipe, "--set", f"seed={seed}"]
    subprocess.run([*command, "--run-directory", str(directory)], check=True, stdout=subprocess.DEVNULL)
    seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return summarize(lines) | {"cpu_seconds": round(cpu_seconds, 1), "seconds": round(seconds, 1)}


def summarize(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Return the numbers that the lines of metrics.jsonl give."""

    def list_values(key: str) -> list[float]:
        return [line[key] for line in lines if line.get(key) is not None]

    accuracies = list_values("evaluation/accuracy")
    mtp_losses = [
        line["train/mtp_1_loss"] for line in lines if "reward/mean" in line and "train/loss" in line
    ]
    return {
        "accuracy_before": accuracies[0],
        "accuracy": accuracies[-1],
        "mtp_loss_ratio": mtp_losses[-1] / mtp_losses[0],
        "mismatch_k3": max(list_values("train/mismatch/k3")),
        "mismatch_log_prob": max(list_values("train/mismatch/max_log_prob_difference")),
    }


def find_failures(values: dict[str, float]) -> list[str]:
    """Return the names of the bounds that are not met."""
    return [
        name
        for name, (bound, is_upper) in BOUNDS.items()
        if (values[name] >= bound if is_upper else values[name] < bound)
    ]


if __name__ == "__main__":
    main()
