"""What patching adds to importing megatron-core, in processes of their own.

python -m benchmarks.patching [--runs N] [--recipe NAME]

Two kinds of process take turns. Both import torch and make the plan of the recipe; then, on the clock of the
CPU, one imports the parts of megatron-core that a worker does, and the other applies the patches and imports
the same, which is when a wrapper gets into its module.
"""

import argparse
import json
import statistics
import subprocess
import sys

IMPORTS = (
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.dist_checkpointing",
    "megatron.core.optimizer",
)

CHILD = """
import importlib, sys, time
import torch
from bundle.patches import patcher
from bundle.planning import build_plan
from bundle.recipe import load

recipe, patched, *modules = sys.argv[1:]
found = build_plan(load(recipe), backend="cpu").patch_plan
begin = time.process_time()
if patched == "patched":
    patcher.apply(found)
for module in modules:
    importlib.import_module(module)
print(time.process_time() - begin, len(found.steps))
"""


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--recipe", default="demo")
    given = parser.parse_args()
    seconds: dict[str, list[float]] = {"bare": [], "patched": []}
    steps = 0
    for _ in range(given.runs):
        for kind, runs in seconds.items():
            took, steps = once(given.recipe, kind)
            runs.append(took)
    found = {
        kind: {"min": round(min(runs), 3), "median": round(statistics.median(runs), 3)}
        for kind, runs in seconds.items()
    }
    print(json.dumps({"steps": steps, "cpu_seconds": found}, indent=2))


def once(recipe: str, kind: str) -> tuple[float, int]:
    """CPU seconds of one process's imports ("bare"), or of patching and them; and how many replacements."""
    command = [sys.executable, "-c", CHILD, recipe, kind, *IMPORTS]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if ran.returncode:
        sys.exit(ran.stderr)
    took, steps = ran.stdout.split()[-2:]
    return float(took), int(steps)


if __name__ == "__main__":
    main()
