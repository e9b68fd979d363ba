"""`mcore-bundle train`: decides about a job and starts this node's ranks, or is one of them."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from bundle.cli import may_fail, options
from bundle.cli.request import JobRequest, spread
from bundle.cli.room import say_room
from bundle.environment import hardware, image, machine, packages
from bundle.environment.ascend import cann
from bundle.environment.doctor import package_findings
from bundle.environment.machine import Level
from bundle.environment.packages import parse_version
from bundle.errors import BundleError, EnvironmentUnfit, ExitCode, UsageError
from bundle.launch import Start, command, events, process
from bundle.launch import job as job_file
from bundle.launch.job import Job
from bundle.launch.rendezvous import Rendezvous, discover
from bundle.launch.restarts import repeated
from bundle.launch.spares import Spares
from bundle.patches import subject
from bundle.planning import Problem, hardware_problem, plan_for, recipe_problem
from bundle.planning.inputs import input_problems
from bundle.planning.plan import refuse
from bundle.planning.problems import devices_problems
from bundle.recipe import Recipe
from bundle.runs.directory import RunDirectory, newest_checkpoint

app = typer.Typer(rich_markup_mode=None, add_completion=False)
# Which node this is, which its ranks learn from whoever starts them.
_OF_NODE = {"nodes", "node_rank", "rendezvous", "dry_run", "restarts", "spares", "preflight", "as_json"}
# What may be said beside --job: who we are and what is installed here, not what is done.
_BESIDE_JOB = _OF_NODE | {"job", "mcore", "wait", "log_level"}


@app.command()
@spread
def train(
    context: typer.Context,
    request: JobRequest,
    recipe: options.Recipe = "",
    fresh: options.Fresh = False,
    job: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Instead of a recipe, what `plan --job` wrote.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Machines that run this job; start it on each.")] = None,
    node_rank: options.NodeRank = None,
    rendezvous: options.Rendezvous = None,
    wait: options.Wait = command.WAIT_SECONDS,
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
    """Train a recipe: pre-training, SFT or DPO. A stopped run goes on where its last checkpoint is."""
    if bool(recipe) is (job is not None):
        raise UsageError("say what to train: a recipe, or --job FILE, and not both")
    if not dry_run:
        may_fail()  # the run directory has it all
    if request.mcore:
        import_megatron_from(request.mcore)

    def here(planned_nodes: int) -> Rendezvous:
        where = discover(
            os.environ,
            nodes=nodes and nodes + spares,
            node_rank=node_rank,
            endpoint=rendezvous,
            planned=planned_nodes + spares,
        )
        if as_json and where.is_rank:
            raise UsageError(f"--json: {where.reason}, and only the command that starts ranks has events")
        return _among(spares, where)

    if job is not None:
        if more := options.said(context) - _BESIDE_JOB:
            raise UsageError(f"--job {job} says all about the job: leave out {', '.join(sorted(more))}")
        told = job_file.load(job)
        where = here(told.nodes)
        if where.is_rank:
            _be_a_rank(where, lambda: job_file.decided(told), told, wait)
        _check(told, where, where.nodes - spares)
    else:
        asked = request.load(recipe)
        where = here(asked.devices.nodes)

        def decide() -> Job:
            return decide_job(asked, request, where, fresh=fresh, spares=spares, is_dry=dry_run)

        if where.is_rank:
            _be_a_rank(where, decide, None, wait)
        told = decide()
    if dry_run:
        # As anybody may start it: of the job file that we would give to the ranks there is none yet.
        words = ("train", *options.words_of(context, _OF_NODE))
        first = where._replace(nodes=told.nodes)
        every = (job_file.launch(told, first._replace(node_rank=node), wait) for node in range(told.nodes))
        launches = [replace(launch, arguments=words, files={}) for launch in every]
        print(command.dry_run(launches, os.environ), end="")
        return
    run_job(told, where, wait=wait, restarts=restarts, spares=spares, preflight=preflight, has_events=as_json)


def decide_job(
    recipe: Recipe,
    request: JobRequest,
    where: Rendezvous,
    *,
    fresh: bool,
    spares: int = 0,
    is_dry: bool = False,
) -> Job:
    """Return the job that a recipe comes to on this machine. Raise what a plan with problems raises."""
    start, directory = request.start(fresh=fresh), request.directory(recipe)
    plan = plan_for(
        recipe,
        backend=request.backend or None,
        allow_drift=request.allow_drift or (),
        nodes=where.nodes - spares,
        per_node=where.per_node or request.devices_per_node,
        beside=[
            *_files(recipe, directory, start),
            *_starter(request.devices_per_node or recipe.devices.per_node, where),
            *(() if is_dry else _packages()),
        ],
    )
    plan.refuse()
    return job_file.of_plan(plan, directory, start=start, record=image.own())


def run_job(
    job: Job,
    where: Rendezvous,
    *,
    wait: int = command.WAIT_SECONDS,
    restarts: int = 0,
    spares: int = 0,
    preflight: bool = False,
    has_events: bool = False,
) -> None:
    """Run this node's ranks of a job to their end, or say that its run is finished."""
    run = RunDirectory(job.directory)
    goes_on = run.begin(job.recipe, job.start)
    with _announce(job, where, has_events=has_events):
        if goes_on and run.finished(job.recipe):
            print(run.nothing_left(), file=sys.stderr if has_events else sys.stdout)
            return
        if where.node_rank == 0:
            say_room(job.recipe, run)
        unfit = _unfit(job, run, where, wait, spares) if preflight else ""
        _run(job, run, where, wait, restarts, spares, unfit, has_events=has_events)


@contextmanager
def _announce(job: Job, where: Rendezvous, *, has_events: bool) -> Iterator[None]:
    """Say where the run lives at the start and at the end, or write the events of these."""
    if not has_events:
        line = f"run directory: {job.directory}\n" if where.node_rank == 0 else ""
        print(line, end="", flush=True)
        try:
            yield
        finally:
            print(line, end="")
        return
    place = {"run_directory": str(job.directory.absolute()), "node_rank": where.node_rank}
    events.write_event("start", **place, recipe=job.recipe.name, nodes=job.nodes, per_node=job.per_node)
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
        events.write_event("end", **place, code=int(code))


def _unfit(told: Job, run: RunDirectory, where: Rendezvous, wait: int, spares: int) -> str:
    """What preflight has against this node, where the job may do without it.

    Raises EnvironmentUnfit with all that it has against any node, where the job needs all of them.
    """
    from bundle.preflight import Asked

    run.logs.mkdir(parents=True, exist_ok=True)
    on = hardware.detect(told.backend)
    asked = Asked(on, run.logs, where, quick=True, devices=told.per_node, wait=wait)
    own, failing = asked.own, [f"{name}: {why}" for name, why in asked.nodes if why]
    if failing and not spares:
        raise EnvironmentUnfit("preflight: nodes are not fit to run this job", failing)
    return f"preflight: {own}" if own else ""


def _run(
    told: Job,
    run: RunDirectory,
    where: Rendezvous,
    wait: int,
    restarts: int,
    spares: int,
    unfit: str,
    *,
    has_events: bool,
) -> None:
    """Runs the ranks of this node, and again where that may mend what broke them."""
    before = run.begun()

    def start(where: Rendezvous, continues: bool, alive: Callable[[], None]) -> None:
        # What has begun anew goes on with that.
        anew = told.start.fresh and run.begun() == before and not continues
        job = replace(told, start=told.start.model_copy(update={"fresh": anew}))
        launch = replace(job_file.launch(job, where, wait), has_events=has_events)
        process.run(launch, os.environ, alive)

    def kept() -> object:
        return newest_checkpoint(told.directory)

    if spares:
        Spares(where, spares, run.logs, wait=wait, most=restarts).run(start, kept, unfit)
    else:
        repeated(lambda: start(where, False, lambda: None), restarts, kept)


def _among(spares: int, where: Rendezvous) -> Rendezvous:
    """Where this process stands among all nodes, of which `spares` are beyond what the job needs.

    Raises UsageError where none is left, and where a rank is told of them.
    """
    if spares and where.is_rank:
        raise UsageError(f"--spares: {where.reason}, and only who starts ranks can start them elsewhere")
    if where.nodes <= spares:
        raise UsageError(f"--spares {spares}: {where.source} says {where.nodes} nodes, so that none is left")
    return where


def import_megatron_from(mcore: str) -> None:
    """Has this process and the ranks that it starts import the megatron-core that --mcore names.

    Raises UsageError for a version that is not installed, and for a tree that would not be imported.
    """
    asked = subject.named(mcore, subject.load())
    if asked.root is not None:
        sys.path.insert(1, str(asked.root))
        paths = (str(asked.root), os.environ.get("PYTHONPATH", ""))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    core = packages.detect().megatron.core
    if asked.root is not None:
        if core is None or core.root != asked.root:
            first = f": {core.root} comes before it ({core.origin})" if core else ""
            raise UsageError(f"--mcore {mcore}: a rank would not import it{first}")
    elif core is None or parse_version(core.version or "") != parse_version(asked.version or ""):
        here = f"megatron-core {core.version} in {core.root}" if core else "no megatron-core"
        raise UsageError(f"--mcore {mcore}: installed is {here}; give the directory of its source instead")


def _be_a_rank(where: Rendezvous, decide: Callable[[], Job], told: Job | None, wait: int) -> Any:
    """Ends this process as a rank, which alone imports torch."""
    from bundle.training.worker import work

    raise typer.Exit(int(work(where, decide, told, wait)))


def _check(told: Job, where: Rendezvous, nodes: int) -> None:
    """Raises with everything that keeps this node from executing a job file."""
    if nodes != told.nodes:
        raise UsageError(f"the job is for {told.nodes} nodes, and {where.source} says {nodes}")
    on = hardware.detect(told.backend)
    refuse(
        told.recipe,
        [
            *_files(told.recipe, told.directory, told.start),
            *_starter(told.per_node, where),
            *_packages(),
            *devices_problems(on, told.per_node),
        ],
    )
    job_file.refuse_misfits(told)


def _files(recipe: Recipe, directory: Path, start: Start) -> list[Problem]:
    """What is wrong with what lies on this machine's disks."""
    run = RunDirectory(directory)
    return [*input_problems(recipe, directory, run.beginning(recipe, start)), *run.problems(recipe, start)]


def _starter(wanted: int | None, where: Rendezvous) -> list[Problem]:
    said = where.per_node
    if wanted is None or said is None or wanted == said:
        return []
    return [recipe_problem(f"devices.per_node: {wanted}, but {where.source}, which starts this, says {said}")]


def _packages() -> list[Problem]:
    """What a rank would miss at its first import, on any backend."""
    here = machine.local()
    found = package_findings(packages.detect(), hardware.detect("cpu", here), cann(here), here.environ)
    without = [f for f in found if f.level is Level.FAIL and f.subject in ("torch", "megatron-core")]
    return [hardware_problem(f"{f.subject}: {f.cause}; {f.fix}") for f in without]
