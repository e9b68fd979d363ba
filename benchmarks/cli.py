"""How long the verbs take to answer: a fresh process each, beside Python and what every verb imports.

python -m benchmarks.cli [--runs N] [--python PATH] [--json]

Ends with 1 where a verb takes more than `LIMIT` times the CPU time of importing typer and pydantic (or what
`LIMITS` gives it).

The verbs take turns, so that what else the machine does slows all of them alike; the fastest run is the one
that it disturbed least. `--python` names the interpreter of another environment, such as one with nothing but
`pip install .` in it.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping

LIMIT = 2.5
# A typer program of one argument takes 1.9 times the measure, with a pydantic model and ruamel.yaml 2.1. What
# a plan does beyond that, the recipe's models and rules, every patch, the memory, does not fit into the rest.
LIMITS = {"mcore-bundle plan demo": 3.0}
MEASURE = "import typer, pydantic"
COMMANDS = {
    "python -c pass": ("-c", "pass"),
    MEASURE: ("-c", MEASURE),
    **{
        f"mcore-bundle {words}": ("-m", "bundle", *words.split())
        for words in ("--help", "recipes list", "doctor", "patches list", "patches plan", "plan demo")
    },
}
ENDINGS = (0, 3)  # 3: doctor found something on this machine


def main() -> None:
    """Prints one line, or one JSON object, for each command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    seconds = measured(given.python, given.runs)
    found = {
        name: {"min": round(min(runs), 3), "median": round(statistics.median(runs), 3)}
        for name, runs in seconds.items()
    }
    if given.json:
        print(json.dumps({"runs": given.runs, "seconds": found}, indent=2))
    else:
        print(f"{'CPU seconds of ' + str(given.runs) + ' runs':<28}{'min':>8}{'median':>8}")
        for name, row in found.items():
            print(f"{name:<28}{row['min']:>8.3f}{row['median']:>8.3f}")
    if slow := too_slow({name: row["min"] for name, row in found.items()}):
        sys.exit("\n".join(slow))


def too_slow(seconds: Mapping[str, float]) -> list[str]:
    """A line for each verb that takes more than its limit times the measure."""
    ratios = {name: taken / seconds[MEASURE] for name, taken in seconds.items()}
    limits = {name: LIMITS.get(name, LIMIT) for name in ratios}
    return [
        f"{name}: {ratio:.2f} times `{MEASURE}`, {limits[name]} at most"
        for name, ratio in ratios.items()
        if ratio > limits[name]
    ]


def measured(python: str, runs: int) -> dict[str, list[float]]:
    """CPU seconds of every command, `runs` of each after one that writes what Python caches."""
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    # Without the caller's choices for Python: compiled modules must be kept, as they are for a user.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as elsewhere:
        for index in range(runs + 1):
            for name, arguments in COMMANDS.items():
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                ran = subprocess.run(
                    [python, *arguments], cwd=elsewhere, env=environment, capture_output=True, timeout=60
                )
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                if index:
                    seconds[name].append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
                if ran.returncode not in ENDINGS:
                    sys.exit(f"{name} ended with {ran.returncode}: {ran.stderr.decode()}")
    return seconds


if __name__ == "__main__":
    main()
