"""`mcore-bundle train`: decides about a job and starts this node's ranks, or runs as one of them."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from bundle import files
from bundle.cli import ignore_stdout_write_errors, options
from bundle.cli.disk_space import warn_disk_space
from bundle.cli.request import JobRequest, Machines, expand_options, plan_job
from bundle.environment import hardware, machine, packages
from bundle.environment.ascend import read_cann_version
from bundle.environment.doctor import check_packages
from bundle.environment.machine import Level
from bundle.environment.packages import parse_version
from bundle.errors import BundleError, EnvironmentUnfit, ExitCode, JobFailed, UsageError
from bundle.imports import pause_gc_and_freeze
from bundle.launch import command, events, nodes, outcomes, process
from bundle.launch import job as job_file
from bundle.launch.causes import FailureKind
from bundle.launch.job import Job
from bundle.launch.process import LaunchFailed
from bundle.launch.rendezvous import Rendezvous, discover
from bundle.launch.restarts import run_with_restarts
from bundle.launch.spares import NodeRunnerWithSpares
from bundle.launch.verdict import Verdict
from bundle.patches import megatron_core
from bundle.planning import Problem, to_hardware_problem, to_recipe_problem
from bundle.planning.plan import raise_gravest_problem
from bundle.planning.problems import find_device_problems, find_open_file_problems
from bundle.recipe import Recipe
from bundle.runs.directory import DirectoryInUse, RunDirectory, find_newest_checkpoint

app = typer.Typer(rich_markup_mode=None, add_completion=False)
# The parameters about this node, which ranks get from their starter.
_LAUNCHER_ONLY_PARAMETERS = {
    "nodes",
    "node_rank",
    "rendezvous",
    "dry_run",
    "restarts",
    "spares",
    "preflight",
    "as_json",
}
# The parameters allowed with --job: about this node and its packages, not about the job.
_JOB_FILE_COMPATIBLE_PARAMETERS = _LAUNCHER_ONLY_PARAMETERS | {"job", "mcore", "wait", "log_level"}


@app.command()
@expand_options
def train(
    context: typer.Context,
    request: JobRequest,
    recipe: options.Recipe = "",
    fresh: options.Fresh = False,
    job: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Train this job file of `plan --job`, not a recipe.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Run on these machines; start it on each.")] = None,
    node_rank: options.NodeRank = None,
    rendezvous: options.Rendezvous = None,
    wait: options.Wait = command.NODE_WAIT_SECONDS,
    restarts: options.Restarts = 0,
    spares: options.Spares = 0,
    preflight: options.Preflight = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print a command for each node that starts its ranks, and stop.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON event a line; all else goes to standard error.")
    ] = False,
) -> None:
    """Train a recipe: pre-training, SFT, DPO or RL. A stopped run continues from its last checkpoint."""
    if bool(recipe) is (job is not None):
        raise UsageError("give exactly one of these: a recipe or --job FILE")
    if not dry_run:
        ignore_stdout_write_errors()  # the run directory has all results
    request = apply_and_clear_mcore(request)

    def discover_rendezvous(planned_nodes: int) -> Rendezvous:
        node_rendezvous = discover(
            os.environ,
            nodes=nodes and nodes + spares,
            node_rank=node_rank,
            endpoint=rendezvous,
            planned_nodes=planned_nodes + spares,
        )
        if as_json and node_rendezvous.is_rank:
            raise UsageError(
                f"--json: {node_rendezvous.reason}, but only the command that starts ranks has events"
            )
        return _refuse_impossible_spares(spares, node_rendezvous)

    if job is not None:
        if conflicting := options.list_set_parameters(context) - _JOB_FILE_COMPATIBLE_PARAMETERS:
            raise UsageError(
                f"--job {job}: the job file already sets {', '.join(sorted(conflicting))}. Leave these"
                " options out"
            )
        decided_job = job_file.load(job)
        node_rendezvous = discover_rendezvous(decided_job.nodes)
        if node_rendezvous.is_rank:
            _run_rank_and_exit(
                node_rendezvous, lambda: job_file.decide_patches(decided_job), decided_job, wait
            )
        _check_local_node_requirements(decided_job, node_rendezvous, node_rendezvous.nodes - spares)
    else:
        loaded_recipe = request.load_recipe(recipe)
        node_rendezvous = discover_rendezvous(loaded_recipe.devices.nodes)

        def decide() -> Job:
            return decide_job(
                loaded_recipe, request, node_rendezvous, fresh=fresh, spares=spares, is_dry=dry_run
            )

        if node_rendezvous.is_rank:
            _run_rank_and_exit(node_rendezvous, decide, None, wait)
        decided_job = decide()
    if dry_run:
        # The commands have the user's options, as the ranks' job file does not exist yet.
        arguments = ("train", *options.build_arguments(context, _LAUNCHER_ONLY_PARAMETERS))
        first_node = node_rendezvous._replace(nodes=decided_job.nodes)
        node_launches = (
            job_file.build_launch(decided_job, first_node._replace(node_rank=node), wait)
            for node in range(decided_job.nodes)
        )
        launches = [replace(launch, arguments=arguments, files={}) for launch in node_launches]
        print(command.format_dry_run(launches, os.environ), end="")
        return
    run_job(
        decided_job,
        node_rendezvous,
        wait=wait,
        restarts=restarts,
        spares=spares,
        preflight=preflight,
        has_events=as_json,
    )


def decide_job(
    recipe: Recipe,
    request: JobRequest,
    rendezvous: Rendezvous,
    *,
    fresh: bool,
    spares: int = 0,
    is_dry: bool = False,
) -> Job:
    """Return the job of a recipe on this machine. Raise what a plan with problems raises."""
    run = RunDirectory(request.find_run_directory(recipe))
    _, problems = run.describe_weights_and_problems(recipe, request.build_start(fresh=fresh))
    problems += _find_ranks_per_node_problems(request.devices_per_node or recipe.devices.per_node, rendezvous)
    problems += () if is_dry else _find_package_problems()
    request = replace(request, devices_per_node=rendezvous.per_node or request.devices_per_node)
    machines = Machines(nodes=rendezvous.nodes - spares)
    return plan_job(recipe, request, machines, fresh=fresh, problems=problems).to_job()


def run_job(
    job: Job,
    rendezvous: Rendezvous,
    *,
    wait: int = command.NODE_WAIT_SECONDS,
    restarts: int = 0,
    spares: int = 0,
    preflight: bool = False,
    has_events: bool = False,
) -> None:
    """Run this node's ranks of a job to their end, or print that its run is finished."""
    run = RunDirectory(job.directory)
    files.restrict_umask_to_group_read()
    is_resumed = run.decide_resume(job.recipe, job.start)
    with _announce_start_and_end(job, rendezvous, has_events=has_events):
        if is_resumed and run.has_required_results(job.recipe):
            print(run.format_finished_run_advice(), file=sys.stderr if has_events else sys.stdout)
            return
        if rendezvous.node_rank == 0:
            warn_disk_space(job.recipe, run)
        unfit_reason = ""
        if preflight:
            # Several nodes also meet in preflight, where nobody tells them that node 0 was refused.
            with run.hold_lock() if rendezvous.nodes == 1 else nullcontext():
                unfit_reason = _describe_preflight_defects(job, run, rendezvous, wait, spares)
        _run_ranks(job, run, rendezvous, wait, restarts, spares, unfit_reason, has_events=has_events)


@contextmanager
def _announce_start_and_end(job: Job, rendezvous: Rendezvous, *, has_events: bool) -> Iterator[None]:
    """Print the run directory at the start and at the end, or write the events of these."""
    if not has_events:
        line = f"run directory: {job.directory}\n" if rendezvous.node_rank == 0 else ""
        print(line, end="", flush=True)
        try:
            yield
        finally:
            print(line, end="")
        return
    event_fields = {"run_directory": str(job.directory.absolute()), "node_rank": rendezvous.node_rank}
    events.print_event(
        "start", **event_fields, recipe=job.recipe.name, nodes=job.nodes, per_node=job.per_node
    )
    code = ExitCode.JOB_FAILED
    try:
        yield
        code = ExitCode.OK
    except BundleError as error:
        code = ExitCode(error.code)
        raise
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
        raise
    finally:
        events.print_event("end", **event_fields, code=int(code))


def _describe_preflight_defects(
    job: Job, run: RunDirectory, rendezvous: Rendezvous, wait: int, spares: int
) -> str:
    """Return preflight's defects of this node, where the job has spare nodes.

    Raise EnvironmentUnfit with the defects of all nodes where the job has no spare node.
    """
    from bundle.preflight import NodeCheck

    run.logs.mkdir(parents=True, exist_ok=True)
    local_hardware = hardware.detect(job.backend)
    node_check = NodeCheck(local_hardware, run.logs, rendezvous, quick=True, devices=job.per_node, wait=wait)
    own_defects, failing = (
        node_check.own_defects,
        [f"{name}: {defect}" for name, defect in node_check.node_defects if defect],
    )
    if failing and not spares:
        raise EnvironmentUnfit("preflight: nodes are not fit to run this job", failing)
    return f"preflight: {own_defects}" if own_defects else ""


def _run_ranks(
    decided_job: Job,
    run: RunDirectory,
    rendezvous: Rendezvous,
    wait: int,
    restarts: int,
    spares: int,
    unfit_reason: str,
    *,
    has_events: bool,
) -> None:
    """Run the ranks of this node, and run them again where a restart may help."""
    earlier_start = run.read_job_file_stamp()

    def start(placement: Rendezvous, continues: bool, alive: Callable[[], None]) -> None:
        # A run that has begun anew continues at a restart.
        is_fresh = decided_job.start.fresh and run.read_job_file_stamp() == earlier_start and not continues
        job = replace(decided_job, start=decided_job.start.model_copy(update={"fresh": is_fresh}))
        with _lock_run_directory(run, placement):
            launch = replace(job_file.build_launch(job, placement, wait), has_events=has_events)
            process.run_ranks_once(launch, os.environ, alive)

    def get_progress() -> object:
        return find_newest_checkpoint(decided_job.directory)

    if spares:
        NodeRunnerWithSpares(rendezvous, spares, run.logs, wait=wait, most_restarts=restarts).run(
            start, get_progress, unfit_reason
        )
    else:
        run_with_restarts(lambda: start(rendezvous, False, lambda: None), restarts, get_progress)


@contextmanager
def _lock_run_directory(run: RunDirectory, rendezvous: Rendezvous) -> Iterator[None]:
    """Lock the run directory within the context, on the node of rank 0.

    Raise LaunchFailed where it cannot be locked, after the nodes that wait for this one were told.
    """
    place = f", port {rendezvous.port}" if rendezvous.nodes > 1 else ""
    with ExitStack() as stack:
        if rendezvous.node_rank == 0:
            try:
                stack.enter_context(run.hold_lock(place))
            except BundleError as error:
                refusal = Verdict(
                    ExitCode(error.code),
                    FailureKind.REFUSED,
                    str(error),
                    node=outcomes.get_node_name(),
                    nodes=rendezvous.nodes,
                )
                # At the same port the other nodes meet the holder of the lock, and may wait for it.
                if not (isinstance(error, DirectoryInUse) and error.holder.endswith(place)):
                    folder = outcomes.find_next_log_folder(run.root, rendezvous.node_rank)
                    with suppress(JobFailed):
                        nodes.write_failed_start_verdict(folder, rendezvous, refusal)
                raise LaunchFailed(refusal) from error
        yield


def _refuse_impossible_spares(spares: int, rendezvous: Rendezvous) -> Rendezvous:
    """Return the place of this process, after a check of the number of spare nodes.

    Raise UsageError where no other node is left, and where a rank gets the option.
    """
    if spares and rendezvous.is_rank:
        raise UsageError(f"--spares: {rendezvous.reason}, but only the command that starts ranks can use it")
    if rendezvous.nodes <= spares:
        raise UsageError(
            f"--spares {spares}: too many spare nodes for the number of nodes ({rendezvous.nodes}, from"
            f" {rendezvous.source})"
        )
    return rendezvous


def apply_and_clear_mcore(request: JobRequest) -> JobRequest:
    """Put the megatron-core of --mcore where this process and its ranks import it; return the other options.

    Raise UsageError for a version that is not installed, and for a tree that would not be imported.
    """
    if not (mcore := request.mcore):
        return request
    named = megatron_core.resolve_core_path_or_version(mcore, megatron_core.load_review_table())
    if named.root is not None:
        sys.path.insert(1, str(named.root))
        paths = (str(named.root), os.environ.get("PYTHONPATH", ""))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    core = packages.detect().megatron.core
    if named.root is not None:
        if core is None or core.root != named.root:
            hint = f", but the megatron-core in {core.root} ({core.origin})" if core else ""
            raise UsageError(f"--mcore {mcore}: a rank would not import this tree{hint}")
    elif core is None or parse_version(core.version or "") != parse_version(named.version or ""):
        description = f"{core.version} in {core.root}" if core else "none"
        raise UsageError(
            f"--mcore {mcore}: this version is not installed (installed: {description}). Give the directory"
            " of its source instead"
        )
    return replace(request, mcore="")


def _run_rank_and_exit(rendezvous: Rendezvous, decide: Callable[[], Job], job: Job | None, wait: int) -> Any:
    """End this process as a rank; only a rank imports torch."""
    with pause_gc_and_freeze():
        from bundle.worker import run_rank

    raise typer.Exit(int(run_rank(rendezvous, decide, job, wait)))


def _check_local_node_requirements(job: Job, rendezvous: Rendezvous, nodes: int) -> None:
    """Raise the problems that keep this node from executing a job file."""
    if nodes != job.nodes:
        raise UsageError(
            f"the number of nodes is {nodes} (from {rendezvous.source}), but the job is for {job.nodes}"
        )
    local_hardware = hardware.detect(job.backend)
    raise_gravest_problem(
        job.recipe,
        [
            *RunDirectory(job.directory).describe_weights_and_problems(job.recipe, job.start)[1],
            *_find_ranks_per_node_problems(job.per_node, rendezvous),
            *_find_package_problems(),
            *find_device_problems(local_hardware, job.per_node),
            *find_open_file_problems(local_hardware, job.nodes, job.per_node),
        ],
    )
    job_file.check_node_environment(job)


def _find_ranks_per_node_problems(per_node: int | None, rendezvous: Rendezvous) -> list[Problem]:
    starter_per_node = rendezvous.per_node
    if per_node is None or starter_per_node is None or per_node == starter_per_node:
        return []
    return [
        to_recipe_problem(
            f"devices.per_node: {per_node}, but the environment variables of this process set"
            f" {starter_per_node} ranks per node ({rendezvous.reason}). Change one of them"
        )
    ]


def _find_package_problems() -> list[Problem]:
    """Return the problems of a rank at its first import, on any backend."""
    local_machine = machine.build_local_machine()
    findings = check_packages(
        packages.detect(),
        hardware.detect("cpu", local_machine),
        read_cann_version(local_machine),
        local_machine.environ,
    )
    failures = [f for f in findings if f.level is Level.FAIL and f.subject in ("torch", "megatron-core")]
    return [to_hardware_problem(f"{f.subject}: {f.cause}; {f.fix}") for f in failures]
