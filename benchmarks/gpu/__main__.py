"""Runs the cases on this machine's GPUs, compares their losses and prints their speed.

python -m benchmarks.gpu [--gpus N] [--only PATTERN...] [--results DIRECTORY]

Exit code 1 when a case fails or a claim does not hold. Every run is left in the results directory as JSON.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.gpu.cases import CURVES, LAYOUTS, MEMORY, SHARES, SPEEDS, Case, plan_of
from benchmarks.gpu.run import Run, read
from benchmarks.gpu.verdicts import judge
from bundle.environment import compatibility, hardware, packages
from bundle.errors import BundleError
from bundle.files import write_json
from bundle.launch.command import Command, Launch, build_command
from bundle.launch.rendezvous import discover

LIMIT_SECONDS = 240


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=1, help="2 adds the layouts of two ranks")
    parser.add_argument("--only", nargs="+", default=["*"], help="names of cases; * stands for anything")
    parser.add_argument("--together", type=int, default=4, help="small cases that run at a time")
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir()) / "benchmarks-gpu")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)

    def chosen(cases: Iterable[Case]) -> list[Case]:
        wanted = [case for case in cases if any(fnmatch(case.name, pattern) for pattern in options.only)]
        return [case for case in wanted if case.gpus <= options.gpus]

    small = [(case, backend) for case in chosen(CURVES) for backend in ("cpu", "cuda") if case.steps(backend)]
    wide, held, large = (
        [(case, "cuda") for case in chosen(cases)] for cases in (LAYOUTS, MEMORY, (*SPEEDS, *SHARES))
    )
    done = start(small, options.results, options.together)
    done += start(wide, options.results, options.together)
    done += start(held, options.results, min(options.together, 3))  # of 35 GiB at most
    done += start(large, options.results, 1)  # alone: these are measured
    runs = {run.name: run for run in done if run is not None}
    verdicts = judge(runs)
    for verdict in verdicts:
        print(f"{'ok' if verdict.holds else 'FAILED':<7}{verdict.claim}: {verdict.seen}")
    for case, _ in large:
        if case.name in runs:
            print(speed(runs[case.name], runs.get(one_gpu(case))))
    good = all(verdict.holds for verdict in verdicts) and len(runs) == len(done)
    if good and verdicts:
        claims = [f"{verdict.claim}: {verdict.seen}" for verdict in verdicts]
        device = hardware.detect("cuda").devices[0].name
        command = " ".join(["python -m benchmarks.gpu", *sys.argv[1:]])
        seen = compatibility.build_proven_combination(packages.detect(), "cuda", device, claims, command)
        write_json(options.results / "combination.json", {"combination": seen.model_dump(mode="json")})
    return 0 if good else 1


def start(jobs: Iterable[tuple[Case, str]], results: Path, together: int) -> list[Run | None]:
    """The run of each job, None for one that failed; `together` at a time, each in its own processes."""
    with ThreadPoolExecutor(together) as pool:
        return list(pool.map(lambda job: one(job[0], job[1], results), jobs))


def one(case: Case, backend: str, results: Path) -> Run | None:
    """The run of one case on one backend; None when it failed, with the end of what its ranks wrote."""
    name = case.named(backend)
    try:
        variables = plan_of(case, backend).environment
    except BundleError as error:
        print(f"FAILED {name}: {error}", flush=True)
        return None
    launch = Launch(
        arguments=(case.name, backend, str(results)),
        rendezvous=discover({}),
        per_node=case.gpus,
        logs=results / "logs" / name,
        environment={
            variable.name: variable.value for variable in variables if variable.name not in case.without
        },
        module="benchmarks.gpu.rank",
    )
    inherited = os.environ | case.environment | ({"OMP_NUM_THREADS": "4"} if backend == "cpu" else {})
    shutil.rmtree(launch.logs, ignore_errors=True)
    if (why := failure(build_command(launch, inherited), inherited)) is not None:
        ends = [f"{path}:\n{path.read_text()[-2000:]}" for path in launch.logs.rglob("stderr.log")]
        print(f"FAILED {name}: {why}", *ends, sep="\n", flush=True)
        return None
    run = read(results / f"{name}.json")
    print(f"{run.name:<32} {curve(run)}", flush=True)
    return run


def failure(command: Command, inherited: Mapping[str, str]) -> str | None:
    """Why the command did not end well; None if it did."""
    with subprocess.Popen(
        command.argv,
        env=command.build_environment(inherited),
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    ) as agent:
        try:
            status = agent.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            agent.send_signal(signal.SIGINT)  # torchrun ends its ranks then
            return f"took longer than {LIMIT_SECONDS} s"
    return None if status == 0 else f"ended with {status}"


def curve(run: Run) -> str:
    """About ten of the losses, main/MTP, and the first gradient norm."""
    some = run.losses[:: max(1, len(run.losses) // 10)]
    points = ("/".join(f"{loss:.3f}" for loss in losses) for losses in some)
    return f"{' '.join(points)}  last {run.losses[-1][0]:.4f}  |g| {run.grad_norms[0]:.4f}"


def one_gpu(case: Case) -> str:
    """The name of the case that does the same on one GPU; empty where none is needed."""
    names = [one.name for one in (*SPEEDS, *SHARES) if one.gpus < case.gpus]
    return max((name for name in names if case.name.startswith(f"{name} ")), key=len, default="")


def speed(run: Run, alone: Run | None) -> str:
    """One line of numbers; `alone` is the same work on one GPU."""
    seconds = run.step_seconds
    share = alone and run.tokens / seconds / 2 / (alone.tokens / alone.step_seconds)
    return (
        f"{run.name:<20} {seconds * 1e3:8.1f} ms/step {run.tokens / seconds:10,.0f} tokens/s"
        f" {run.flops / seconds / 1e12:6.0f} TFLOP/s {run.peak_bytes / 2**30:6.1f} GiB"
        + (f" {share:6.1%} of one GPU's tokens/s on each" if share else "")
    )


if __name__ == "__main__":
    sys.exit(main())
