"""The proof of each patch on this machine: its measurement fails without the patch and not with it.

Each run of a measurement happens in a child process of its own, which reports what its ranks saw.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

from bundle import capabilities, files
from bundle.environment import BACKENDS, packages
from bundle.errors import EnvironmentUnfit
from bundle.patches import Patch, plan
from bundle.patches.catalogue import PATCHES
from bundle.patches.megatron_core import (
    find_installed_or_default_core,
    load_review_table,
    resolve_core_path_or_version,
)
from bundle.patches.plan import PatchPlan, Survey, survey_patches
from bundle.verification.check import CHECKS_BY_PATCH_ID, Check, Observation, Result, Status, judge

ProcessStarter = Callable[[Path, Sequence[Sequence[str]], dict[str, str], float], None]
_Process = subprocess.Popen[bytes]
_ORDERS_FILE, _PLAN_FILE = "orders.json", "patches.json"
_START_SECONDS = 120.0  # seconds for importing torch and megatron on a busy machine
_POLL_SECONDS = 0.05  # seconds between two looks at the answers


def verify(
    backend: str,
    ids: Collection[str] = (),
    *,
    tree: Path | None = None,
    devices: int | None = None,
    start: ProcessStarter | None = None,
) -> Iterator[Result]:
    """Yield the result for each patch as soon as it is known: for the patches in `ids`, or all needed ones.

    `tree`: the directory that holds `megatron`; None for the one that is importable. `devices`: the largest
    number of ranks; None for any number. `start`: see `run_orders`. Raises UsageError for unknown ids, and
    EnvironmentUnfit where there is no megatron.
    """
    decisions = {decision.id: decision for decision in decide_patches(backend, tree, ids).decisions}
    patch_survey = decide_patches(backend, tree)
    if patch_survey.core.root is None:
        raise EnvironmentUnfit(
            "no megatron-core on the Python path to prove patches with. Install one, or put a checkout on"
            " PYTHONPATH"
        )
    needed_patches = list_needed_patches(patch_survey)
    selected = [patch for patch in PATCHES if patch.id in ids] if ids else needed_patches
    impossible = {
        patch.id: f"the installed megatron-core is not patched: {decisions[patch.id].reason}"
        for patch in selected
        if patch not in needed_patches
    } | {
        patch.id: f"needs {CHECKS_BY_PATCH_ID[patch.id].world} devices, but this machine has {devices}"
        for patch in selected
        if devices is not None and CHECKS_BY_PATCH_ID[patch.id].world > devices
    }
    unproven = (Result(patch, Status.NOT_PROVABLE, reason) for patch, reason in impossible.items())
    possible = [patch for patch in selected if patch.id not in impossible]
    return chain(unproven, _prove_patches(possible, patch_survey, backend, start))


def decide_patches(
    backend: str, tree: Path | None = None, requested: Collection[str] | None = None
) -> Survey:
    """Return every decision about a megatron-core on a backend, whatever the job.

    Opt-in patches count as requested unless `requested` is given.
    """
    installed_packages, table = packages.detect(), load_review_table()
    core = (
        find_installed_or_default_core(installed_packages, table)
        if tree is None
        else resolve_core_path_or_version(str(tree), table)
    )
    requested_ids = [patch.id for patch in PATCHES if patch.opt_in] if requested is None else requested
    return survey_patches(core, table, installed_packages, backend=backend, requested=requested_ids)


def list_needed_patches(patch_survey: Survey) -> list[Patch]:
    """Return the patches that the survey applies."""
    chosen = {decision.id for decision in patch_survey.patches_to_apply}
    return [patch for patch in PATCHES if patch.id in chosen]


def build_needed_patch_plan(patch_survey: Survey) -> PatchPlan:
    """Return the plan that applies all needed patches, whatever else was decided; each run takes its part."""
    return plan.build_patch_plan(patch_survey._replace(decisions=patch_survey.patches_to_apply))


def _prove_patches(
    patches: Sequence[Patch], patch_survey: Survey, backend: str, start: ProcessStarter | None
) -> Iterator[Result]:
    needed_patches = list_needed_patches(patch_survey)
    # Checks of several ranks come first, while no process is ahead of another one.
    checked = sorted(((p, CHECKS_BY_PATCH_ID[p.id]) for p in patches), key=lambda pair: -pair[1].world)
    orders: list[WorkOrder] = []
    for patch, check in checked:
        base_patches = _find_base_patches(patch, check, needed_patches)
        for applied in (base_patches, (*base_patches, patch.id)):
            orders.append(WorkOrder(len(orders), check.measurement, check.world, check.seconds, applied))
    observations: dict[int, list[Observation]] = {}
    plan = build_needed_patch_plan(patch_survey)
    for order, rank_observations in run_orders(
        orders, plan, backend=backend, root=patch_survey.core.root, start=start
    ):
        observations[order.number] = rank_observations
        index = order.number // 2
        if {2 * index, 2 * index + 1} <= observations.keys():
            patch, check = checked[index]
            yield judge(patch.id, check, observations[2 * index], observations[2 * index + 1])


def _find_base_patches(patch: Patch, check: Check, needed_patches: Sequence[Patch]) -> tuple[str, ...]:
    """Return the ids of the other patches that both runs have.

    They are the patches that this backend always needs, unlike others, and those that the check needs.
    """
    return tuple(
        p.id for p in needed_patches if p.id != patch.id and (p.backends != BACKENDS or p.id in check.needs)
    )


@dataclass(frozen=True, slots=True)
class WorkOrder:
    """One run of a measurement with these patches applied."""

    number: int
    measurement: str
    world: int
    seconds: float
    patches: tuple[str, ...]  # ids

    def choose_ranks(self, process_count: int) -> tuple[int, ...]:
        """Return the processes that take part. Runs of one rank are distributed over all processes."""
        return tuple(range(self.world)) if self.world > 1 else (self.number % process_count,)


def read_orders(directory: Path) -> list[WorkOrder]:
    """Return the orders, in the order in which they run."""
    return [
        WorkOrder(**(order | {"patches": tuple(order["patches"])}))
        for order in json.loads((directory / _ORDERS_FILE).read_text())
    ]


def read_plan(directory: Path, order: WorkOrder) -> PatchPlan:
    """Return the plan that applies this order's patches."""
    full_plan = plan.load_patch_plan(json.loads((directory / _PLAN_FILE).read_text()))
    return replace(full_plan, steps=tuple(step for step in full_plan.steps if step.patch in order.patches))


def get_run_directory(directory: Path, order: WorkOrder) -> Path:
    """Return the directory of one run, for its files and its store."""
    return directory / str(order.number)


def write_observation(directory: Path, order: WorkOrder, rank: int, observation: Observation) -> None:
    """Write what a rank saw; the first answer stands."""
    file = _get_observation_path(directory, order, rank)
    if not file.exists():
        files.write_json(file, asdict(observation))


def read_existing_observations(directory: Path, order: WorkOrder, process_count: int) -> list[Observation]:
    """Return what the ranks saw; fewer than there are ranks if some never answered."""
    files = (_get_observation_path(directory, order, rank) for rank in order.choose_ranks(process_count))
    return [Observation(**json.loads(file.read_text())) for file in files if file.exists()]


def _get_observation_path(directory: Path, order: WorkOrder, rank: int) -> Path:
    return directory / f"{order.number}.{rank}.json"


def run_orders(
    orders: Sequence[WorkOrder],
    plan: PatchPlan,
    *,
    backend: str,
    root: Path | None,
    start: ProcessStarter | None = None,
) -> Iterator[tuple[WorkOrder, list[Observation]]]:
    """Yield each order and what its ranks saw, as soon as it has ended.

    A rank that dies or hangs is reported as "Died". `plan`: all patches that an order may name. `root`: the
    directory that holds `megatron`. `start`: a function that runs `bundle.verification.rank` once for each
    line of arguments, with this environment, for at most so many seconds. It leaves what each one wrote to
    its standard error in the directory, as RANK.err. None: local processes.
    """
    # On the cpu a process imports everything once and forks for every run; a device survives no fork.
    portions = [list(orders)] if backend == "cpu" and orders else [[order] for order in orders]
    with tempfile.TemporaryDirectory(prefix="mcore-bundle-verify-") as name:
        for number, portion in enumerate(portions):
            yield from _run_portion(Path(name) / str(number), portion, plan, backend, root, start)


def _run_portion(
    directory: Path,
    orders: Sequence[WorkOrder],
    plan: PatchPlan,
    backend: str,
    root: Path | None,
    start: ProcessStarter | None,
) -> Iterator[tuple[WorkOrder, list[Observation]]]:
    process_count = max((order.world for order in orders), default=0)
    for order in orders:
        get_run_directory(directory, order).mkdir(parents=True)
    (directory / _PLAN_FILE).write_text(json.dumps(plan.dump()))
    (directory / _ORDERS_FILE).write_text(json.dumps([asdict(order) for order in orders]))
    arguments = [(str(rank), str(process_count), str(directory), backend) for rank in range(process_count)]
    seconds = _START_SECONDS + sum(order.seconds for order in orders)
    deadline, remaining, running = time.monotonic() + seconds, list(orders), []
    try:
        if start is None:
            running = _start_processes(directory, arguments, _build_environment(backend, root))
        else:
            start(directory, arguments, _build_environment(backend, root), seconds)
        while remaining:
            # Checked before the answers are read: a process that has ended has answered before.
            has_ended = all(process.poll() is not None for process in running) or time.monotonic() > deadline
            for order in list(remaining):
                observations = read_existing_observations(directory, order, process_count)
                if len(observations) == order.world:
                    remaining.remove(order)
                    yield order, observations
            if has_ended:
                break
            time.sleep(_POLL_SECONDS)
    finally:
        for process in running:
            _kill_process_group(process)
    for order in remaining:  # a missing answer is reported as such
        died = Observation(raised="Died", message=read_last_lines(directory))
        yield order, [*read_existing_observations(directory, order, process_count), died]


def _build_environment(backend: str, root: Path | None) -> dict[str, str]:
    path = [*([str(root)] if root else []), *(entry or str(Path.cwd()) for entry in sys.path)]
    backend_variables = {
        variable.name: variable.value
        for variable in capabilities.find_capabilities(backend).list_variables(frozenset())
    }
    # One host: whatever its name resolves to, gloo shall use the loopback device. And fp32 shall be fp32:
    # Transformer Engine's products would be TF32, whose rounding is larger than what must agree.
    fixed_variables = {
        "OMP_NUM_THREADS": "1",
        "NVIDIA_TF32_OVERRIDE": "0",
        "PYTHONPATH": os.pathsep.join(path),
    }
    return {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **backend_variables, **fixed_variables}


def _start_processes(
    directory: Path, arguments: Sequence[Sequence[str]], environ: dict[str, str]
) -> list[_Process]:
    """Start a process for each line of arguments."""
    running = []
    for rank, rank_arguments in enumerate(arguments):
        with (directory / f"{rank}.err").open("wb") as log:
            running.append(
                subprocess.Popen(
                    [sys.executable, "-m", "bundle.verification.rank", *rank_arguments],
                    env=environ,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    return running


def _kill_process_group(process: _Process) -> None:
    """End a process and its children, even if it has ended itself: forked runs leave children behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_last_lines(directory: Path) -> str:
    """Return the last line of each process's output, which says why it ended.

    torch-npu's own last lines are left out, because they name no cause.
    """
    texts = (log.read_text(errors="replace").strip() for log in sorted(directory.glob("*.err")))
    logs = (re.sub(r"(\n\[ERROR\] .* ERR\d+ .*)+\Z", "", text).splitlines() for text in texts)
    return " | ".join(dict.fromkeys(lines[-1][:300] for lines in logs if lines)) or "no answer"
