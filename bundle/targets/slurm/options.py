"""The options of a job on Slurm that the job file does not have, and the checks of their form."""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

import typer

from bundle.errors import format_value
from bundle.targets.options import Preflight, Rdma, Restarts, Spares, allow_only

CONTAINER_RUNTIMES = ("pyxis", "apptainer")
_UNDASHED_OPTION_PATTERN = re.compile(r"[a-z][a-z-]*(=.*)?")
_LAYOUT_REASON = "the job sets this from --nodes and --devices-per-node"
_SINGLE_SCRIPT_REASON = "a job is one batch script that is queued once"
_RESERVED_LOG_PATH_REASON = "`launch stop` and `launch logs` find a job by its log in the run directory"
_RESERVED_SUBMISSION_REASON = "sbatch must queue the job, print the job number and exit"
_HANDLE_WITHOUT_CLUSTER_REASON = (
    "a job handle names no cluster. Set SLURM_CLUSTERS, which all Slurm commands read"
)
_TIME_LIMIT_VARIABLE_REASON = (
    "the time limit must leave time for a save. Use --sbatch time=... or --sbatch signal=... instead"
)
_UNCHECKED_SBATCH_VARIABLE_REASON = "`launch` does not check this variable. Use --sbatch instead"
# Options that the user may not set, with the reason: another value would start an unchecked job.
_RESERVED_OPTIONS = {
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node"), _LAYOUT_REASON),
    **dict.fromkeys(("array", "wrap"), _SINGLE_SCRIPT_REASON),
    **dict.fromkeys(("output", "error"), _RESERVED_LOG_PATH_REASON),
    **dict.fromkeys(
        ("wait", "test-only", "parsable", "help", "usage", "version"), _RESERVED_SUBMISSION_REASON
    ),
    "clusters": _HANDLE_WITHOUT_CLUSTER_REASON,
}
# Variables with the same effect, which win over the options of a script (sbatch's manual page).
_FORBIDDEN_SBATCH_VARIABLES = {
    "SBATCH_ARRAY_INX": _SINGLE_SCRIPT_REASON,
    "SBATCH_OUTPUT": _RESERVED_LOG_PATH_REASON,
    "SBATCH_ERROR": _RESERVED_LOG_PATH_REASON,
    "SBATCH_WAIT": _RESERVED_SUBMISSION_REASON,
    "SBATCH_CLUSTERS": _HANDLE_WITHOUT_CLUSTER_REASON,
    "SBATCH_TIMELIMIT": _TIME_LIMIT_VARIABLE_REASON,
    "SBATCH_SIGNAL": _TIME_LIMIT_VARIABLE_REASON,
    **{
        f"SBATCH_{suffix}": _UNCHECKED_SBATCH_VARIABLE_REASON
        for suffix in ("GRES", "GPUS", "GPUS_PER_NODE", "GPUS_PER_TASK")
    },
    **{
        f"SBATCH_{suffix}": _UNCHECKED_SBATCH_VARIABLE_REASON
        for suffix in ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU")
    },
    **{f"SBATCH_{suffix}": _UNCHECKED_SBATCH_VARIABLE_REASON for suffix in ("NO_REQUEUE", "OPEN_MODE")},
}
# Slurm may send the signal that much earlier than requested (sbatch's manual page, --signal).
_SIGNAL_EARLY_DELIVERY_SECONDS = 60
_DEFAULT_SIGNAL_LEAD_SECONDS = 60  # before the end, where an option names a signal alone
_TIME_PATTERN = re.compile(
    r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?", re.ASCII
)


@dataclass(frozen=True)
class SlurmOptions:
    """The cluster's options beside the job: the requests of the job, and its container.

    Options in `sbatch` win over our options of sbatch.
    """

    sbatch: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="OPTION[=VALUE]", help="Pass this to sbatch: partition=gpu, account=us, time=4:00:00, ..."
        ),
    ] = ()
    image: Annotated[str, typer.Option(help="Run the job in this image. Default: this environment.")] = ""
    container: Annotated[
        str,
        typer.Option(callback=allow_only(CONTAINER_RUNTIMES), help=f"Use {' or '.join(CONTAINER_RUNTIMES)}."),
    ] = CONTAINER_RUNTIMES[0]
    mounts: Annotated[
        tuple[str, ...],
        typer.Option("--mount", metavar="SRC[:DST]", help="Mount another path in the container."),
    ] = ()
    rdma: Rdma = False
    restarts: Restarts = 0
    preflight: Preflight = False
    spares: Spares = 0
    ray: Annotated[
        bool, typer.Option("--ray", help="Start a Ray cluster on the job's nodes, and the ranks through it.")
    ] = False
    python: str = sys.executable

    def find_violations(self) -> Iterator[str]:
        """Yield a message for each option that cannot be written into a batch script."""
        for option in self.sbatch:
            if not option.isprintable():
                yield f"--sbatch {format_value(option)}: contains a control character"
            elif not _UNDASHED_OPTION_PATTERN.fullmatch(option):
                form = "OPTION[=VALUE] without dashes before it, such as partition=gpu"
                yield f"--sbatch {format_value(option)}: must be {form}"
            elif reserved := _find_reserved_option(name := split_name_and_value(option)[0]):
                short = "" if name == reserved else f"sbatch may read this as --{reserved}, which is "
                reason = _RESERVED_OPTIONS[reserved]
                yield f"--sbatch {format_value(option)}: {short}not allowed, because {reason}"
        if self.container not in CONTAINER_RUNTIMES:
            runtimes = ", ".join(CONTAINER_RUNTIMES)
            yield f"--container {format_value(self.container)}: must be one of {runtimes}"
        if self.mounts and not self.image:
            yield "--mount: only a container has mounts. Set --image too"
        if self.ray and self.spares:
            yield "--ray: conflicts with --spares, as Slurm must start spare nodes. Leave out one of them"


def split_name_and_value(option: str) -> tuple[str, str]:
    """Return the name and the value of an option of sbatch."""
    name, _, value = option.partition("=")
    return name, value


def find_sbatch_variable_violations(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a message for each variable that would make sbatch ignore an option of the script."""
    for name, reason in _FORBIDDEN_SBATCH_VARIABLES.items():
        if name in environ:
            yield f"{name}: not allowed, because {reason}"


def find_short_time_limit_violations(sbatch_options: Mapping[str, str], signal: str) -> Iterator[str]:
    """Yield a message for each time limit in `sbatch_options` that tells a job to save as it starts.

    Such a job would make one step, be queued again, and so on. `signal` is the value of that option of
    sbatch, for example "TERM@300".
    """
    _, _, before = signal.partition("@")
    lead_seconds = (
        int(before) if before.isdecimal() else _DEFAULT_SIGNAL_LEAD_SECONDS
    ) + _SIGNAL_EARLY_DELIVERY_SECONDS
    for name in ("time", "time-min"):
        limit = parse_time_limit(sbatch_options.get(name, ""))
        if limit is not None and limit <= lead_seconds:
            yield (
                f"--sbatch {name}={sbatch_options[name]}: this time limit leaves no time to train, because"
                f" Slurm tells the job up to {lead_seconds} s before the limit to save a checkpoint and end."
                f" Set more than {lead_seconds // 60} minutes"
            )


def parse_time_limit(limit: str) -> int | None:
    """Return a time limit of Slurm in seconds.

    Return None where it is not a limit: 0, UNLIMITED, or a text that sbatch will refuse.
    """
    if not (match := _TIME_PATTERN.fullmatch(limit)):
        return None
    days, *parts = (int(part) if part else None for part in match.groups())
    numbers = [part for part in parts if part is not None]
    if days is None:  # minutes, minutes:seconds, hours:minutes:seconds; with days, hours come first
        numbers = [0, *numbers] if len(numbers) < 3 else numbers
    hours, minutes, rest = (*numbers, 0, 0)[:3]
    return (days or 0) * 86400 + hours * 3600 + minutes * 60 + rest or None


def _find_reserved_option(name: str) -> str:
    """Return the reserved option that sbatch reads in a name or an abbreviation; "" where none."""
    return next((reserved for reserved in _RESERVED_OPTIONS if reserved.startswith(name)), "")
