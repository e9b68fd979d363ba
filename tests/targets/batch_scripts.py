"""Batch scripts of Slurm for tests: the jobs that they are of, and bash that runs them without Slurm."""

import subprocess
from pathlib import Path

from bundle.launch.job import Job, from_plan
from bundle.planning import build_plan
from bundle.recipe import load


def decided(backend: str = "cuda", hardware: str = "h200", nodes: int = 2, per_node: int = 8) -> Job:
    """A job in /runs/demo."""
    recipe = load("demo", ["parallel.tp=2", "parallel.sequence_parallel=true", "train.global_batch_size=64"])
    made = build_plan(
        recipe, backend=backend, hardware_name=hardware, mcore="0.16.1", nodes=nodes, per_node=per_node
    )
    made.raise_gravest_problem()
    return from_plan(made, Path("/runs/demo"))


def in_bash(script: str, srun: str = "exit 0", log: Path | None = None) -> list[str]:
    """The words that Slurm's clients get when bash runs a batch script; what it writes goes to a log."""
    recorder = f"srun() {{ printf '%s\\0' \"$@\" >&3; ({srun}); }}\n"
    recorder += (
        "scontrol() { printf '%s\\0' \"$@\" >&3; }\nscancel() { printf '%s\\0' scancel \"$@\" >&3; }\n"
    )
    command = f'exec 3>&1 >>"$LOG"\n{recorder}{script}'
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        env={"SLURM_JOB_ID": "7", "LOG": str(log or "/dev/null")},
        text=True,
        check=False,
    )
    assert not done.stderr, done.stderr
    return done.stdout.split("\0")[:-1]
