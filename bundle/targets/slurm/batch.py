"""The batch script of a job: its requests, the command of every node, and whether it is queued again.

Each node has one task, which executes the job file. The job file lies beside the script in the run directory,
which must have the same path on all nodes.
"""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from bundle.errors import ExitCode, UsageError, format_value
from bundle.files import compute_short_json_digest
from bundle.launch import grace
from bundle.launch import job as job_file
from bundle.launch.job import FILE_NAME, Job
from bundle.launch.nodes import build_lost_node_verdict
from bundle.targets import ray
from bundle.targets.slurm import containers, resources
from bundle.targets.slurm.options import SlurmOptions, find_short_time_limit_violations, split_name_and_value

# The starts in a row that may make one step each. A job that is told to save while it starts makes one step.
# Without this maximum it would be queued again for ever where its time limit, or the partition's, is short.
MAX_SINGLE_STEP_STARTS = 3
# Files beside the script, followed by the job's number: the request to stop, and the exit code of its script.
STOPPED_PREFIX, ENDED_PREFIX = "stopped-", "ended-"
LOST_NODES_VERDICT_FILE_PREFIX = "verdict-"  # of the file of the same kind with the verdict on lost nodes
_VERDICT_NODES_PLACEHOLDER = "@NODES@"  # what the script replaces in that verdict
JOB_DIRECTORY_PREFIX = "slurm-"  # of the name of a job's directory
_MOST_GRACE_SECONDS = 65535  # the longest time before a time limit that sbatch accepts


def get_job_directory(job: Job) -> Path:
    """Return the directory of a job's files in its run directory; no other job has this name.

    A fresh start of the run keeps it.
    """
    return (
        job.directory.absolute() / "logs" / f"{JOB_DIRECTORY_PREFIX}{compute_short_json_digest(job.dump())}"
    )


def build_script(job: Job, options: SlurmOptions, workdir: Path) -> str:
    """Return the batch script. Raise UsageError with everything that it cannot hold.

    `workdir` is the directory in which the ranks run, to which relative paths of the recipe belong.
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
        # Without it, a lost node ends the job. The loss of the first node, where the script runs, still does.
        **({"no-kill": ""} if options.spares else {}),
        "signal": f"{'B:' if options.ray else ''}TERM"
        f"@{min(grace.estimate_save_seconds(job), _MOST_GRACE_SECONDS)}",
    }
    sbatch_options = ours | resources.with_devices(
        job, dict(split_name_and_value(option) for option in options.sbatch)
    )
    wrong = [*options.find_violations(), *resources.find_device_violations(job, options)]
    wrong += containers.find_unmountable_path_violations(job, options, workdir)
    texts = (options.image, *options.mounts, str(workdir), str(directory))
    unprintable = (text for text in texts if not text.isprintable())
    wrong += [f"{format_value(text)}: contains a control character" for text in unprintable]
    if "%" in str(directory):
        path = format_value(str(job.directory))
        wrong.append(f"--run-directory {path}: must not contain %, which Slurm would replace")
    if wrong := [*wrong, *find_short_time_limit_violations(sbatch_options, sbatch_options["signal"])]:
        raise UsageError("the batch script cannot be generated", wrong)
    directives = "\n".join(
        f"#SBATCH {_format_long_option(name, value)}" for name, value in sbatch_options.items()
    )
    # Tasks that lose another one end by themselves with a telling code; tasks that Slurm ends have none.
    step = ["srun", "--cpu-bind=none", "--kill-on-bad-exit=0", *(["--no-kill"] if options.spares else [])]
    step += containers.build_command_prefix(job, options, workdir)
    run = (
        _render_ray(step, directory, options) if options.ray else _render_ranks(step, job, directory, options)
    )
    return f"""#!/bin/bash
{directives}
# Written by `mcore-bundle launch slurm`; every node executes {FILE_NAME} beside this script.
{_MEMLOCK_LINES if options.rdma else ""}{_render_resume_step_recording(job, directory)}
{run}
{_render_preemption_requeue(directory)}"""


# srun passes this shell's limits to its tasks; sbatch passed those of the submitting machine to the shell.
_MEMLOCK_LINES = """# Memory that a network card writes to stays where it is: as much as this node allows.
ulimit -l "$(ulimit -Hl)"
"""


def _render_resume_step_recording(job: Job, directory: Path) -> str:
    """Return the lines that record, for every start, the step after which it begins.

    `checkpoints.directory` defines the names of a run's checkpoints and of `latest`.
    """
    latest = job.directory.absolute() / "checkpoints" / "latest"
    return f"""latest={shlex.quote(str(latest))}
newest() {{ step=$(cat "$latest" 2>/dev/null | tr -dc 0-9); echo $((10#0$step)); }}
starts={shlex.quote(f"{directory}/starts-")}$SLURM_JOB_ID
ended={shlex.quote(f"{directory}/{ENDED_PREFIX}")}$SLURM_JOB_ID
rm -f "$ended"
(newest >>"$starts") 2>/dev/null"""


def _render_preemption_requeue(directory: Path) -> str:
    """Return the lines that queue a job again or write down its exit code.

    A job is queued again where it can continue.
    """
    stopped, limit = shlex.quote(f"{directory}/{STOPPED_PREFIX}") + '"$SLURM_JOB_ID"', MAX_SINGLE_STEP_STARTS
    return f"""# A job that was asked to save, as by its time limit, is queued again; a stopped job is not.
goes_on() {{
    [ $code -eq {ExitCode.PREEMPTED.value} ] && [ ! -e {stopped} ] || return
    mapfile -t last < <(tail -n {limit} "$starts" 2>/dev/null)
    if [ ${{#last[@]}} -ge {limit} ] && [ "$(newest)" -le $((last[0] + {limit})) ]; then
        echo "not queued again: {limit} starts in a row made one step each, as the job is asked to save while"
        echo "it starts. Give it more time (--sbatch time=...), or a partition without preemption"
        return 1
    fi
}}
if ! {{ goes_on && scontrol requeue "$SLURM_JOB_ID"; }}; then
    # The exit code tells other machines that the output is complete there.
    sync /dev/stdout 2>/dev/null
    (echo $code >"$ended") 2>/dev/null
    # The record of a job that was stopped says CANCELLED, not FAILED.
    case $code in {ExitCode.PREEMPTED.value} | {ExitCode.TERMINATED.value})
        [ ! -e {stopped} ] || scancel "$SLURM_JOB_ID" ;;
    esac
fi
exit $code
"""


def _render_ranks(step: Sequence[str], job: Job, directory: Path, options: SlurmOptions) -> str:
    """Return the lines that start the ranks of all nodes and keep their exit code."""
    arguments = job_file.build_train_arguments(
        job,
        directory / FILE_NAME,
        restarts=options.restarts,
        preflight=options.preflight,
        spares=options.spares,
    )
    command = shlex.join((*step, *arguments))
    if options.spares:  # Slurm does not end such a job when a node is lost
        return f"{command}\ncode=$?"
    return f"{_render_lost_node_report(directory)}\n{command} &\nwait $!\ncode=$?"


def _render_lost_node_report(directory: Path) -> str:
    """Return the lines that write a verdict when Slurm ends the job because a node is lost.

    Slurm may know of the loss before the other nodes notice it. The script then ends as without these lines.
    """
    lost_node = build_lost_node_verdict([_VERDICT_NODES_PLACEHOLDER], "Slurm says that it is down")
    file = shlex.quote(f"{directory}/{LOST_NODES_VERDICT_FILE_PREFIX}")
    return f"""report_lost() {{
    nodes=$(sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --states=down --format=%N | sort -u)
    [ -n "$nodes" ] || return
    nodes=${{nodes//$'\\n'/, }}
    verdict={shlex.quote(json.dumps(lost_node.dump()))}
    echo "${{verdict//{_VERDICT_NODES_PLACEHOLDER}/$nodes}}" >{file}"$SLURM_JOB_ID".json
    sentence={shlex.quote(lost_node.sentence)}
    echo "${{sentence//{_VERDICT_NODES_PLACEHOLDER}/$nodes}}"
}}
trap 'report_lost; trap - TERM; kill -TERM $$' TERM"""


def _render_ray(step: Sequence[str], directory: Path, options: SlurmOptions) -> str:
    """Return the lines that start a Ray cluster on all nodes, and the job on that cluster.

    A file requests the save, as Slurm's signal would reach Ray's processes as well on some clusters.
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


def _format_long_option(name: str, value: str) -> str:
    """Return one option in the form that sbatch reads in a script: it only knows a shell's quotes."""
    return f"--{name}={_quote_sbatch_value(value)}" if value else f"--{name}"


def _quote_sbatch_value(value: str) -> str:
    plain = re.fullmatch(r"[\w@%+=:,./-]*", value, re.ASCII)
    return value if plain else '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
