"""Slurm: the batch script of a job, and what sbatch, scontrol and scancel are asked.

One task stands for each node and executes the job file, which lies beside the script in the run directory:
the nodes must see that directory under the same path.

Containers are those of pyxis (github.com/NVIDIA/pyxis/wiki/Usage) and of Apptainer; both were read, not run.
"""

import logging
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bundle import capabilities, files
from bundle.errors import ExitCode, LaunchUnavailable, UsageError, shown
from bundle.files import json_digest
from bundle.launch import grace
from bundle.launch import job as job_file
from bundle.launch.job import NAME, Job
from bundle.targets import ray
from bundle.targets.client import asked
from bundle.targets.growing import grown

_log = logging.getLogger(__name__)

CONTAINERS = ("pyxis", "apptainer")
SCRIPT = "job.sh"
# How often a job is looked at, and for how long a controller may be away meanwhile.
LOOK_SECONDS, PATIENCE_SECONDS = 2.0, 600
_LONGEST_GRACE = 65535  # that sbatch takes before a time limit
_OPTION = re.compile(r"[a-z][a-z-]*(=.*)?")
_IMAGE = re.compile(r"(?P<host>[^/#]+\.[^/#]+|[^/#]+:[0-9]+|localhost)/(?P<name>.+)")
# What the job decides; another number would start something else than what was checked.
_DECIDED = {"nodes", "ntasks", "ntasks-per-node", "array", "wrap"}
_RUNNING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED", "RESIZING")
_ENDS = {
    "CANCELLED": ExitCode.TERMINATED,
    "TIMEOUT": ExitCode.TERMINATED,
    "PREEMPTED": ExitCode.TERMINATED,
    "DEADLINE": ExitCode.TERMINATED,
}


@dataclass(frozen=True)
class Options:
    """What the cluster wants to know, beside the job: how the job is asked for, and what it runs in.

    `sbatch`: further options of sbatch, "partition=gpu" or "exclusive", which win over ours; `mounts`: what a
    container sees of the host, "SRC" or "SRC:DST", beside the working and the run directory; `restarts`: how
    often ranks are started again in place, without a new checkpoint between; `preflight`: first every node
    does what the job will ask of it; `spares`: nodes beyond those of the job, which take the place of others;
    `ray`: its nodes are started through a Ray cluster of their own.
    """

    sbatch: tuple[str, ...] = ()
    image: str = ""
    container: str = CONTAINERS[0]
    mounts: tuple[str, ...] = ()
    restarts: int = 0
    preflight: bool = False
    spares: int = 0
    ray: bool = False
    python: str = sys.executable

    def violations(self) -> Iterator[str]:
        """All that cannot be written into a batch script."""
        for option in self.sbatch:
            if not _OPTION.fullmatch(option):
                yield f"--sbatch {shown(option)}: no option of sbatch, such as partition=gpu"
            elif _named(option)[0] in _DECIDED:
                yield f"--sbatch {shown(option)}: the job says that (--nodes, --devices-per-node)"
        if self.container not in CONTAINERS:
            yield f"--container {shown(self.container)}: one of {', '.join(CONTAINERS)}"
        if self.mounts and not self.image:
            yield "--mount: only a container has mounts: say --image as well"
        yield from (f"--mount {shown(text)}: holds a comma" for text in self.mounts if "," in text)
        if self.ray and (self.preflight or self.spares):
            yield "--ray: leave out --preflight and --spares, which nodes do that Slurm starts by itself"


class State(NamedTuple):
    """What Slurm says of a job: its state, why it waits, where its output goes, its exit code once ended."""

    name: str
    reason: str
    output: Path | None
    code: int | None

    @property
    def ended(self) -> bool:
        return self.code is not None


def placed(job: Job) -> Path:
    """Where a job's files belong in its run directory: by a name that no other job has.

    A fresh start of the run leaves them.
    """
    return job.directory.absolute() / "logs" / f"slurm-{json_digest(job.dump())}"


def script(job: Job, options: Options, workdir: Path) -> str:
    """The batch script. Raises UsageError with everything that it cannot hold.

    `workdir` is where the ranks run: relative paths of the recipe are looked for there.
    """
    where = placed(job)
    texts = (*options.sbatch, options.image, *options.mounts, str(workdir), str(where))
    wrong_names = [f"{shown(text)}: holds a control character" for text in texts if not text.isprintable()]
    if "%" in str(where):
        wrong_names.append(f"--run-directory {shown(str(job.directory))}: Slurm reads % as its own")
    if wrong := [*options.violations(), *wrong_names]:
        raise UsageError("no batch script can be written", wrong)
    ours = {
        "job-name": job.recipe.name,
        "nodes": str(job.nodes + options.spares),
        "ntasks-per-node": "1",
        "exclusive": "",
        "mem": "0",
        "chdir": str(workdir),
        "output": f"{where}/slurm-%j.log",
        "open-mode": "append",
        "requeue": "",
        # A node that is lost ends all of them otherwise; only the first, where the script runs, still does.
        **({"no-kill": ""} if options.spares else {}),
        "signal": f"{'B:' if options.ray else ''}TERM@{min(grace.seconds(job), _LONGEST_GRACE)}",
    }
    if resource := capabilities.of(job.backend).resource(job.generation):
        ours |= dict([_named(resource.slurm.format(job.per_node))])
    theirs = dict(_named(option) for option in options.sbatch)
    directives = "\n".join(f"#SBATCH {_option(name, value)}" for name, value in (ours | theirs).items())
    # Tasks that are left alone end by themselves, with a code that says why; ended by Slurm, with none.
    step = ["srun", "--cpu-bind=none", "--kill-on-bad-exit=0", *(["--no-kill"] if options.spares else [])]
    step += _inside(job, options, workdir)
    run = _through_ray(step, where, options) if options.ray else _ranks(step, job, where, options)
    stopped, ended = (shlex.quote(f"{where}/{what}-") for what in ("stopped", "ended"))
    return f"""#!/bin/bash
{directives}
# Written by `mcore-bundle launch slurm`; what every node executes is {NAME} beside it.
{run}
# Told to save, by its time limit or for another job: it goes on from its checkpoint, unless it was to stop.
if [ $code -eq {ExitCode.PREEMPTED.value} ] && [ ! -e {stopped}"$SLURM_JOB_ID" ]; then
    scontrol requeue "$SLURM_JOB_ID"
else
    (echo $code >{ended}"$SLURM_JOB_ID") 2>/dev/null
fi
exit $code
"""


def _ranks(step: Sequence[str], job: Job, where: Path, options: Options) -> str:
    """The lines that start the ranks of all nodes, and keep what they come to."""
    words = job_file.words(
        job,
        where / NAME,
        restarts=options.restarts,
        preflight=options.preflight,
        spares=options.spares,
    )
    return f"{shlex.join((*step, *words))}\ncode=$?"


def _through_ray(step: Sequence[str], where: Path, options: Options) -> str:
    """The lines that start a Ray cluster on all nodes, and the job in there.

    Slurm's signal would reach Ray's processes as well, of some clusters: to save is asked for by a file.
    """
    words = ("launch", "ray", f"--job={where / NAME}", f"--restarts={options.restarts}", "--start")
    stop = shlex.quote(str(where / ray.STOP))
    return f"""rm -f {stop}
save() {{ touch {stop}; }}
trap save TERM
{shlex.join((*step, *words))} &
# A signal ends the wait, and not the step; one that has ended says its code as often as it is asked.
while kill -0 $! 2>/dev/null; do wait $!; done
wait $!
code=$?"""


def submit(job: Job, options: Options, workdir: Path) -> str:
    """Hands a job to Slurm; returns its number. Raises LaunchUnavailable where Slurm will not have it."""
    text, where = script(job, options, workdir), placed(job)
    where.mkdir(parents=True, exist_ok=True)
    files.write_text(where / NAME, job.text())
    files.write_text(where / SCRIPT, text)
    number = asked("sbatch", "--parsable", str(where / SCRIPT)).strip().partition(";")[0]
    if not number.isdigit():
        raise LaunchUnavailable(f"sbatch answered {shown(number)}, which is no number of a job")
    return number


def state(number: str) -> State:
    """What Slurm says of a job, or once it has forgotten it, what that left in its run directory.

    Raises LaunchUnavailable where neither does.
    """
    try:
        said = _fields(asked("scontrol", "--oneliner", "show", "job", number))
    except LaunchUnavailable:
        if (ended := _forgotten(number)) is None:
            raise
        return ended
    name, output = said.get("JobState", "UNKNOWN"), said.get("StdOut")
    code = None
    if name not in _RUNNING:
        status, _, signal = said.get("ExitCode", "1:0").partition(":")
        code = int(_ENDS.get(name, int(status) or (128 + int(signal) if signal != "0" else 0)))
        if name in ("NODE_FAIL", "BOOT_FAIL"):
            code = int(ExitCode.LAUNCH_UNAVAILABLE)
    return State(name, said.get("Reason", ""), Path(output) if output else None, code)


def stop(number: str) -> None:
    """Has a job save and end, one that waits not begin."""
    now = state(number)
    if now.ended:
        return
    if now.name == "RUNNING" and now.output is not None:
        (now.output.parent / f"stopped-{number}").touch()
        # The step alone, whose batch script says how it ended; of Ray's, the script, which has it save.
        batch = ["--batch"] if files.is_file(now.output.parent / ray.TOKEN) else []
        asked("scancel", *batch, "--signal=TERM", number)
    else:
        asked("scancel", number)


def written(number: str) -> str:
    """All that a job has written. Raises UsageError where that is nothing yet."""
    now = state(number)
    if now.output is None or not files.is_file(now.output):
        raise UsageError(f"slurm:{number}: has written nothing yet")
    return now.output.read_text(errors="replace")


def follow(number: str, seconds: float = LOOK_SECONDS) -> Iterator[str]:
    """What a job writes, as it comes, until it has ended; a job that is requeued has not."""
    yield from grown(now.output for now in _looked_at(number, seconds))


def wait(number: str, seconds: float = LOOK_SECONDS) -> int:
    """The exit code of a job, once it has ended."""
    *_, last = _looked_at(number, seconds)
    assert last.code is not None, "it has ended"
    return last.code


def _looked_at(number: str, seconds: float) -> Iterator[State]:
    """How a job is, every now and then until it has ended; a controller that is away may come back."""
    silent = 0.0
    while True:
        try:
            now, silent = state(number), 0.0
        except LaunchUnavailable as error:
            if silent >= PATIENCE_SECONDS:
                raise
            if not silent:
                _log.warning("%s; asks again for %d s", error, PATIENCE_SECONDS)
            silent += seconds
        else:
            yield now
            if now.ended:
                return
        time.sleep(seconds)


def _forgotten(number: str) -> State | None:
    """How a job ended that Slurm no longer knows, by what it left in a run directory below this one."""
    for left in Path().glob(f"runs/*/logs/slurm-*/ended-{number}"):
        code = (files.read(left) or "").strip()
        if code.isdigit():
            return State("ENDED", "Slurm has forgotten it", left.parent / f"slurm-{number}.log", int(code))
    return None


def _inside(job: Job, options: Options, workdir: Path) -> Sequence[str]:
    """The words of srun and of the container that come before the verb."""
    mounts = [f"{path}:{path}" for path in dict.fromkeys((workdir, job.directory.absolute()))]
    mounts += [mount if ":" in mount else f"{mount}:{mount}" for mount in options.mounts]
    if not options.image:
        return ["--", options.python, "-m", "bundle"]
    if options.container == "apptainer":
        binds = [word for mount in mounts for word in ("--bind", mount)]
        gpus = ["--nv"] if job.backend == "cuda" else []
        inner = ["apptainer", "exec", *gpus, "--no-home", "--pwd", str(workdir), *binds, options.image]
        return ["--", *inner, "mcore-bundle"]
    match = _IMAGE.fullmatch(options.image)
    # pyxis parts the registry from the name by "#"; a path, and a name without a registry, are as they are.
    image = f"{match['host']}#{match['name']}" if match else options.image
    return [
        f"--container-image={image}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={workdir}",
        "--no-container-mount-home",
        "--",
        "mcore-bundle",
    ]


def _named(option: str) -> tuple[str, str]:
    name, _, value = option.partition("=")
    return name, value


def _option(name: str, value: str) -> str:
    """One option as sbatch reads it in a script: it knows the quotes of a shell, and nothing else of it."""
    return f"--{name}={_quoted(value)}" if value else f"--{name}"


def _quoted(value: str) -> str:
    plain = re.fullmatch(r"[\w@%+=:,./-]*", value, re.ASCII)
    return value if plain else '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def _fields(line: str) -> Mapping[str, str]:
    """The NAME=VALUE of scontrol's one line; a value goes on until the next name."""
    return dict(re.findall(r"(?:^|\s)([A-Z]\w*)=(.*?)(?=\s[A-Z][\w:/]*=|\s*$)", line))
