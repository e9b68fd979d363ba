"""The batch script of a job: what is asked for, what every node executes, and whether it is queued again.

One task stands for each node and executes the job file, which lies beside the script in the run directory:
the nodes must see that directory under the same path.
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from bundle.errors import ExitCode, UsageError, format_value
from bundle.files import digest_json
from bundle.launch import grace
from bundle.launch import job as job_file
from bundle.launch.job import FILE_NAME, Job
from bundle.targets import ray
from bundle.targets.slurm import containers, resources
from bundle.targets.slurm.options import SlurmOptions, find_short_limits, split_option

# Starts in a row that may come to one step each. A job that is told to save while it starts makes one step,
# saves, and would be queued again for ever where the time limit, be it its partition's, allows no more.
MAX_SHORT_STARTS = 3
_MOST_GRACE_SECONDS = 65535  # that sbatch takes before a time limit


def get_job_directory(job: Job) -> Path:
    """Where a job's files belong in its run directory: by a name that no other job has.

    A fresh start of the run leaves them.
    """
    return job.directory.absolute() / "logs" / f"slurm-{digest_json(job.dump())}"


def build_script(job: Job, options: SlurmOptions, workdir: Path) -> str:
    """The batch script. Raises UsageError with everything that it cannot hold.

    `workdir` is where the ranks run: relative paths of the recipe are looked for there.
    """
    directory = get_job_directory(job)
    ours = {
        "job-name": job.recipe.name,
        "nodes": str(job.nodes + options.spares),
        "ntasks-per-node": "1",
        "exclusive": "",
        "mem": "0",
        "chdir": str(workdir),
        "output": f"{directory}/slurm-%j.log",
        "open-mode": "append",
        "requeue": "",
        # A node that is lost ends all of them otherwise; only the first, where the script runs, still does.
        **({"no-kill": ""} if options.spares else {}),
        "signal": f"{'B:' if options.ray else ''}TERM"
        f"@{min(grace.estimate_save_seconds(job), _MOST_GRACE_SECONDS)}",
    }
    sbatch_options = ours | resources.with_devices(
        job, dict(split_option(option) for option in options.sbatch)
    )
    wrong = [*options.find_violations(), *resources.find_violations(job, options)]
    wrong += containers.find_violations(job, options, workdir)
    texts = (*options.sbatch, options.image, *options.mounts, str(workdir), str(directory))
    wrong += [f"{format_value(text)}: holds a control character" for text in texts if not text.isprintable()]
    if "%" in str(directory):
        wrong.append(f"--run-directory {format_value(str(job.directory))}: Slurm reads % as its own")
    if wrong := [*wrong, *find_short_limits(sbatch_options, sbatch_options["signal"])]:
        raise UsageError("no batch script can be written", wrong)
    directives = "\n".join(f"#SBATCH {_format_option(name, value)}" for name, value in sbatch_options.items())
    # Tasks that are left alone end by themselves, with a code that says why; ended by Slurm, with none.
    step = ["srun", "--cpu-bind=none", "--kill-on-bad-exit=0", *(["--no-kill"] if options.spares else [])]
    step += containers.build_command_prefix(job, options, workdir)
    run = (
        _render_ray(step, directory, options) if options.ray else _render_ranks(step, job, directory, options)
    )
    return f"""#!/bin/bash
{directives}
# Written by `mcore-bundle launch slurm`; what every node executes is {FILE_NAME} beside it.
{_MEMLOCK_LINES if options.rdma else ""}{_render_prologue(job, directory)}
{run}
{_render_requeue_or_exit(directory)}"""


# srun hands the limits of here on to its tasks; sbatch handed on those of the machine where it was called.
_MEMLOCK_LINES = """# Memory that a network card writes to stays where it is: as much as this node allows.
ulimit -l "$(ulimit -Hl)"
"""


def _render_prologue(job: Job, directory: Path) -> str:
    """The lines that keep, of every start, the step that it begins after.

    What a run's checkpoints and `latest` among them are called: checkpoints.directory.
    """
    latest = job.directory.absolute() / "checkpoints" / "latest"
    return f"""latest={shlex.quote(str(latest))}
newest() {{ step=$(cat "$latest" 2>/dev/null | tr -dc 0-9); echo $((10#0$step)); }}
starts={shlex.quote(f"{directory}/starts-")}$SLURM_JOB_ID
(newest >>"$starts") 2>/dev/null"""


def _render_requeue_or_exit(directory: Path) -> str:
    """The lines that have a job queued again which goes on, and keep the code of another."""
    stopped, ended = (shlex.quote(f"{directory}/{name}-") for name in ("stopped", "ended"))
    limit = MAX_SHORT_STARTS
    return f"""# Told to save, as by its time limit, it goes on from its checkpoint; stopped, not.
goes_on() {{
    [ $code -eq {ExitCode.PREEMPTED.value} ] && [ ! -e {stopped}"$SLURM_JOB_ID" ] || return
    mapfile -t last < <(tail -n {limit} "$starts" 2>/dev/null)
    if [ ${{#last[@]}} -ge {limit} ] && [ "$(newest)" -le $((last[0] + {limit})) ]; then
        echo "not queued again: {limit} starts in a row came to a step each, as it is told to save while it"
        echo "starts: give it more time, --sbatch time=..., or a partition where nothing preempts it"
        return 1
    fi
}}
if ! {{ goes_on && scontrol requeue "$SLURM_JOB_ID"; }}; then
    (echo $code >{ended}"$SLURM_JOB_ID") 2>/dev/null
fi
exit $code
"""


def _render_ranks(step: Sequence[str], job: Job, directory: Path, options: SlurmOptions) -> str:
    """The lines that start the ranks of all nodes, and keep what they come to."""
    arguments = job_file.build_arguments(
        job,
        directory / FILE_NAME,
        restarts=options.restarts,
        preflight=options.preflight,
        spares=options.spares,
    )
    return f"{shlex.join((*step, *arguments))}\ncode=$?"


def _render_ray(step: Sequence[str], directory: Path, options: SlurmOptions) -> str:
    """The lines that start a Ray cluster on all nodes, and the job in there.

    Slurm's signal would reach Ray's processes as well, of some clusters: to save is asked for by a file.
    """
    arguments = [
        "launch",
        "ray",
        f"--job={directory / FILE_NAME}",
        f"--restarts={options.restarts}",
        "--start",
    ]
    arguments += ["--preflight"] if options.preflight else []
    stop = shlex.quote(str(directory / ray.STOP_NAME))
    return f"""rm -f {stop}
save() {{ touch {stop}; }}
trap save TERM
{shlex.join((*step, *arguments))} &
# A signal ends the wait, and not the step; one that has ended says its code as often as it is asked.
while kill -0 $! 2>/dev/null; do wait $!; done
wait $!
code=$?"""


def _format_option(name: str, value: str) -> str:
    """One option as sbatch reads it in a script: it knows the quotes of a shell, and nothing else of it."""
    return f"--{name}={_quote(value)}" if value else f"--{name}"


def _quote(value: str) -> str:
    plain = re.fullmatch(r"[\w@%+=:,./-]*", value, re.ASCII)
    return value if plain else '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
