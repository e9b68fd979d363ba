"""What Slurm is told of a job beside the job itself, and what of it cannot be said."""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bundle.errors import shown

CONTAINERS = ("pyxis", "apptainer")
_OPTION = re.compile(r"[a-z][a-z-]*(=.*)?")
_LAYOUT = "the job says that (--nodes, --devices-per-node)"
_SCRIPT = "a job is one batch script, queued once"
_PLACE = "`launch stop` and `launch logs` know a job by where its log lies, in its run directory"
_NUMBER = "sbatch is to queue the job, say its number and end"
_CLUSTER = "a handle names no cluster: say SLURM_CLUSTERS, which all of Slurm's clients read"
_TOLD = "a limit is held against the time that a save takes: say --sbatch time=... or --sbatch signal=..."
_OTHERWISE = "it was not looked at: unset it, or say it by --sbatch"
# Options that may not be said, by why; another value would start something else than what was checked.
_DECIDED = {
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node"), _LAYOUT),
    **dict.fromkeys(("array", "wrap"), _SCRIPT),
    **dict.fromkeys(("output", "error"), _PLACE),
    **dict.fromkeys(("wait", "test-only", "parsable", "help", "usage", "version"), _NUMBER),
    "clusters": _CLUSTER,
}
# Variables by which sbatch is told the same, and which win over what a script says (its manual page).
_VARIABLES = {
    "SBATCH_ARRAY_INX": _SCRIPT,
    "SBATCH_OUTPUT": _PLACE,
    "SBATCH_ERROR": _PLACE,
    "SBATCH_WAIT": _NUMBER,
    "SBATCH_CLUSTERS": _CLUSTER,
    "SBATCH_TIMELIMIT": _TOLD,
    "SBATCH_SIGNAL": _TOLD,
    **{f"SBATCH_{of}": _OTHERWISE for of in ("GRES", "GPUS", "GPUS_PER_NODE", "GPUS_PER_TASK")},
    **{f"SBATCH_{of}": _OTHERWISE for of in ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU")},
    **{f"SBATCH_{of}": _OTHERWISE for of in ("NO_REQUEUE", "OPEN_MODE")},
}
# Slurm may tell a job to save that much earlier than it was asked to (sbatch's manual page, --signal).
_EARLIER_SECONDS = 60
_SIGNAL_SECONDS = 60  # before the end, where an option names a signal alone
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?", re.ASCII)


@dataclass(frozen=True)
class Options:
    """What the cluster wants to know, beside the job: how the job is asked for, and what it runs in.

    `sbatch`: further options of sbatch, "partition=gpu" or "exclusive", which win over ours; `mounts`: what a
    container sees of the host, "SRC" or "SRC:DST", beside the working and the run directory; `restarts`: how
    often ranks are started again in place, without a new checkpoint between; `preflight`: first every node
    does what the job will ask of it; `spares`: nodes beyond those of the job, which take the place of others;
    `ray`: its nodes are started through a Ray cluster of their own; `rdma`: with network cards for that.
    """

    sbatch: tuple[str, ...] = ()
    image: str = ""
    container: str = CONTAINERS[0]
    mounts: tuple[str, ...] = ()
    restarts: int = 0
    preflight: bool = False
    spares: int = 0
    ray: bool = False
    rdma: bool = False
    python: str = sys.executable

    def violations(self) -> Iterator[str]:
        """All that cannot be written into a batch script."""
        for option in self.sbatch:
            if not _OPTION.fullmatch(option):
                yield f"--sbatch {shown(option)}: no option of sbatch, such as partition=gpu"
            elif meant := _decided(name := named(option)[0]):
                short = "" if name == meant else f"sbatch may take it for --{meant}: "
                yield f"--sbatch {shown(option)}: {short}{_DECIDED[meant]}"
        if self.container not in CONTAINERS:
            yield f"--container {shown(self.container)}: one of {', '.join(CONTAINERS)}"
        if self.mounts and not self.image:
            yield "--mount: only a container has mounts: say --image as well"
        if self.ray and self.spares:
            yield "--ray: leave out --spares, which are of nodes that Slurm starts by itself"


def named(option: str) -> tuple[str, str]:
    """The name of an option of sbatch, and its value."""
    name, _, value = option.partition("=")
    return name, value


def overruled(environ: Mapping[str, str]) -> Iterator[str]:
    """The variables that would have sbatch do something else than what the script says."""
    for name, why in _VARIABLES.items():
        if name in environ:
            yield f"{name} is set, which wins over the batch script: {why}"


def too_short(theirs: Mapping[str, str], signal: str) -> Iterator[str]:
    """Every time limit of `theirs` by which a job is told to save as soon as it starts.

    It would make one step, be queued again, and so on. `signal` is that option of sbatch: "TERM@300".
    """
    _, _, before = signal.partition("@")
    told = (int(before) if before.isdecimal() else _SIGNAL_SECONDS) + _EARLIER_SECONDS
    for name in ("time", "time-min"):
        limit = seconds(theirs.get(name, ""))
        if limit is not None and limit <= told:
            yield (
                f"--sbatch {name}={theirs[name]}: the job is told to save up to {told} s before that, as soon"
                f" as it starts: more than {told // 60} minutes"
            )


def seconds(limit: str) -> int | None:
    """A time limit of Slurm in seconds; None where it is none: 0, UNLIMITED, or what sbatch will refuse."""
    if not (match := _TIME.fullmatch(limit)):
        return None
    days, *parts = (int(part) if part else None for part in match.groups())
    given = [part for part in parts if part is not None]
    if days is None:  # minutes, minutes:seconds, hours:minutes:seconds; with days, hours come first
        given = [0, *given] if len(given) < 3 else given
    hours, minutes, rest = (*given, 0, 0)[:3]
    return (days or 0) * 86400 + hours * 3600 + minutes * 60 + rest or None


def _decided(name: str) -> str:
    """The option that may not be said which sbatch reads in a name, be that abbreviated; "" where none."""
    return next((meant for meant in _DECIDED if meant.startswith(name)), "")
