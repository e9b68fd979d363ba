"""Short runs that measure the speed of a recipe on this machine."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bundle import files
from bundle.errors import JobFailed
from bundle.recipe.document import to_yaml
from bundle.recipe.recipe import Recipe
from bundle.runs.metrics import SPEED

WARMUP_STEPS, MEASURED_STEPS = 3, 5
# The keys of a run that ends after these steps, and writes as little as it can.
_SHORT_RUN_OVERRIDES = {
    "train": {
        "steps": WARMUP_STEPS + MEASURED_STEPS,
        "samples": None,
        "epochs": None,
        "eval_interval": 0,
        "eval_batches": 1,
        "early_stop": None,
        "log_interval": 1,
    },
    "optimizer": {"schedule": "constant", "warmup_steps": 0, "warmup_ratio": None},
    "checkpoint": {"interval": 0, "keep": 1, "export": None, "export_interval": 0},
    "metrics": {"tensorboard": False, "wandb": None, "mlflow": None, "prometheus": None},
}


def measure_speed(recipe: Recipe, folder: Path, arguments: Sequence[str]) -> float:
    """Return the tokens per second of a recipe, the median of `MEASURED_STEPS` steps of a run in `folder`.

    `arguments` are those of `train`. Raise JobFailed with the last line of a run that failed.
    """
    values = recipe.dump()
    for section, keys in _SHORT_RUN_OVERRIDES.items():
        values[section] |= keys
    values |= {"profile": None}
    values["optimizer"] |= {"wsd_decay_steps": None, "wsd_decay_style": None}
    file, run = folder / "recipe.yaml", folder / "run"
    files.write_text(file, to_yaml(values))
    command = [sys.executable, "-m", "bundle", "train", str(file), f"--run-directory={run}", *arguments]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode:
        last_line = (result.stdout.strip().splitlines() or ["it printed nothing"])[-1]
        raise JobFailed(f"exit code {result.returncode}: {last_line}")
    reports = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    speeds = [float(report[SPEED]) for report in reports if SPEED in report]
    return median(speeds[WARMUP_STEPS:])
