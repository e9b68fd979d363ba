"""Proves each patch on this machine: what goes wrong without it, and that it does not with it.

Each run of a measurement is one of a child process of its own, which says what its ranks saw.
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
from bundle.patches.plan import PatchPlan, Survey, survey
from bundle.patches.subject import installed, load, named
from bundle.verification.check import CHECKS, Check, Observation, Result, Status, judge

Start = Callable[[Path, Sequence[Sequence[str]], dict[str, str], float], None]
_Process = subprocess.Popen[bytes]
_ORDERS, _PLAN = "orders.json", "patches.json"
_START = 120.0  # seconds for importing torch and megatron on a busy machine
_PAUSE = 0.05  # seconds between two looks at the answers


def verify(
    backend: str,
    ids: Collection[str] = (),
    *,
    tree: Path | None = None,
    devices: int | None = None,
    start: Start | None = None,
) -> Iterator[Result]:
    """Whether patches are proven on this machine, each as soon as it is known: those named, or all needed.

    `tree`: the directory that holds `megatron`; None for the one that is importable. `devices`: how many
    ranks there may be; None for any number. `start`: see `observed`. Raises UsageError for unknown ids,
    EnvironmentUnfit where there is no megatron.
    """
    decisions = {decision.id: decision for decision in decide(backend, tree, ids).decisions}
    found = decide(backend, tree)
    if found.subject.root is None:
        raise EnvironmentUnfit(
            "There is no megatron-core on the Python path whose patches could be proven. Install one, or put "
            "a checkout on PYTHONPATH"
        )
    standing = needed(found)
    asked = [patch for patch in PATCHES if patch.id in ids] if ids else standing
    impossible = {
        patch.id: f"this megatron is not patched: {decisions[patch.id].reason}"
        for patch in asked
        if patch not in standing
    } | {
        patch.id: f"takes {CHECKS[patch.id].world} devices, and this machine has {devices}"
        for patch in asked
        if devices is not None and CHECKS[patch.id].world > devices
    }
    unproven = (Result(patch, Status.NOT_PROVABLE, why) for patch, why in impossible.items())
    possible = [patch for patch in asked if patch.id not in impossible]
    return chain(unproven, _proven(possible, found, backend, start))


def decide(backend: str, tree: Path | None = None, requested: Collection[str] | None = None) -> Survey:
    """Every decision about a megatron on a backend, whatever the job; opt-in patches count as requested."""
    here, table = packages.detect(), load()
    subject = installed(here, table) if tree is None else named(str(tree), table)
    wanted = [patch.id for patch in PATCHES if patch.opt_in] if requested is None else requested
    return survey(subject, table, here, backend=backend, requested=wanted)


def needed(found: Survey) -> list[Patch]:
    """The patches to apply."""
    chosen = {decision.id for decision in found.applied}
    return [patch for patch in PATCHES if patch.id in chosen]


def everything(found: Survey) -> PatchPlan:
    """The plan that applies all of them, of which each run takes its part, whatever else was decided."""
    return plan.make(found._replace(decisions=found.applied))


def _proven(patches: Sequence[Patch], found: Survey, backend: str, start: Start | None) -> Iterator[Result]:
    standing = needed(found)
    # Checks of several ranks come first, while no process is ahead of another one.
    checked = sorted(((p, CHECKS[p.id]) for p in patches), key=lambda pair: -pair[1].world)
    orders: list[Order] = []
    for patch, check in checked:
        base = _base(patch, check, standing)
        for applied in (base, (*base, patch.id)):
            orders.append(Order(len(orders), check.measurement, check.world, check.seconds, applied))
    seen: dict[int, list[Observation]] = {}
    plan = everything(found)
    for order, answers in observed(orders, plan, backend=backend, root=found.subject.root, start=start):
        seen[order.number] = answers
        index = order.number // 2
        if {2 * index, 2 * index + 1} <= seen.keys():
            patch, check = checked[index]
            yield judge(patch.id, check, seen[2 * index], seen[2 * index + 1])


def _base(patch: Patch, check: Check, standing: Sequence[Patch]) -> tuple[str, ...]:
    """What stands in both runs: what this backend, unlike others, needs always, and what the check needs."""
    return tuple(
        p.id for p in standing if p.id != patch.id and (p.backends != BACKENDS or p.id in check.needs)
    )


@dataclass(frozen=True, slots=True)
class Order:
    """One run of a measurement with these patches applied."""

    number: int
    measurement: str
    world: int
    seconds: float
    patches: tuple[str, ...]  # ids

    def ranks(self, processes: int) -> tuple[int, ...]:
        """Which of the processes take part; runs of one rank are shared out among them."""
        return tuple(range(self.world)) if self.world > 1 else (self.number % processes,)


def read_orders(directory: Path) -> list[Order]:
    """The orders, in the order in which they run."""
    return [
        Order(**(order | {"patches": tuple(order["patches"])}))
        for order in json.loads((directory / _ORDERS).read_text())
    ]


def read_plan(directory: Path, order: Order) -> PatchPlan:
    """The plan that applies this order's patches."""
    whole = plan.load(json.loads((directory / _PLAN).read_text()))
    return replace(whole, steps=tuple(step for step in whole.steps if step.patch in order.patches))


def scratch(directory: Path, order: Order) -> Path:
    """The directory of one run: its files, its store."""
    return directory / str(order.number)


def answer(directory: Path, order: Order, rank: int, seen: Observation) -> None:
    """Lays down what a rank saw; the first answer stands."""
    file = _file(directory, order, rank)
    if not file.exists():
        files.write_json(file, asdict(seen))


def answers(directory: Path, order: Order, processes: int) -> list[Observation]:
    """What the ranks saw; fewer than there are ranks if some never answered."""
    files = (_file(directory, order, rank) for rank in order.ranks(processes))
    return [Observation(**json.loads(file.read_text())) for file in files if file.exists()]


def _file(directory: Path, order: Order, rank: int) -> Path:
    return directory / f"{order.number}.{rank}.json"


def observed(
    orders: Sequence[Order], plan: PatchPlan, *, backend: str, root: Path | None, start: Start | None = None
) -> Iterator[tuple[Order, list[Observation]]]:
    """Each order with what its ranks saw, as soon as it has ended; a rank that dies or hangs is seen as that.

    `plan`: all patches that an order may name. `root`: the directory that holds `megatron`. `start`: runs
    `bundle.verification.rank` once for each line of arguments, with this environment, at most so many
    seconds, and leaves in the directory what each wrote to its standard error, as RANK.err; None: processes.
    """
    # On the cpu a process imports everything once and forks for every run; a device survives no fork.
    portions = [list(orders)] if backend == "cpu" and orders else [[order] for order in orders]
    with tempfile.TemporaryDirectory(prefix="mcore-bundle-verify-") as name:
        for number, portion in enumerate(portions):
            yield from _portion(Path(name) / str(number), portion, plan, backend, root, start)


def _portion(
    directory: Path,
    orders: Sequence[Order],
    plan: PatchPlan,
    backend: str,
    root: Path | None,
    start: Start | None,
) -> Iterator[tuple[Order, list[Observation]]]:
    processes = max((order.world for order in orders), default=0)
    for order in orders:
        scratch(directory, order).mkdir(parents=True)
    (directory / _PLAN).write_text(json.dumps(plan.dump()))
    (directory / _ORDERS).write_text(json.dumps([asdict(order) for order in orders]))
    arguments = [(str(rank), str(processes), str(directory), backend) for rank in range(processes)]
    seconds = _START + sum(order.seconds for order in orders)
    deadline, left, running = time.monotonic() + seconds, list(orders), []
    try:
        if start is None:
            running = _started(directory, arguments, _environ(backend, root))
        else:
            start(directory, arguments, _environ(backend, root), seconds)
        while left:
            # Asked before the answers are read: what has ended has answered before.
            ended = all(process.poll() is not None for process in running) or time.monotonic() > deadline
            for order in list(left):
                found = answers(directory, order, processes)
                if len(found) == order.world:
                    left.remove(order)
                    yield order, found
            if ended:
                break
            time.sleep(_PAUSE)
    finally:
        for process in running:
            _end(process)
    for order in left:  # what is missing is reported as such
        died = Observation(raised="Died", message=last_words(directory))
        yield order, [*answers(directory, order, processes), died]


def _environ(backend: str, root: Path | None) -> dict[str, str]:
    path = [*([str(root)] if root else []), *(entry or str(Path.cwd()) for entry in sys.path)]
    wanted = {variable.name: variable.value for variable in capabilities.of(backend).variables(frozenset())}
    # One host: whatever its name resolves to, gloo shall use the loopback device. And fp32 shall be fp32:
    # Transformer Engine's products would be TF32, whose rounding is larger than what must agree.
    ours = {"OMP_NUM_THREADS": "1", "NVIDIA_TF32_OVERRIDE": "0", "PYTHONPATH": os.pathsep.join(path)}
    return {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **wanted, **ours}


def _started(directory: Path, arguments: Sequence[Sequence[str]], environ: dict[str, str]) -> list[_Process]:
    """A process for each line of arguments."""
    running = []
    for rank, words in enumerate(arguments):
        with (directory / f"{rank}.err").open("wb") as log:
            running.append(
                subprocess.Popen(
                    [sys.executable, "-m", "bundle.verification.rank", *words],
                    env=environ,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    return running


def _end(process: _Process) -> None:
    """Ends a process and what it started, even if it has ended: forked runs leave what they started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_words(directory: Path) -> str:
    """The last line of each process's output, where it says why it ended; torch-npu's own names no cause."""
    texts = (log.read_text(errors="replace").strip() for log in sorted(directory.glob("*.err")))
    logs = (re.sub(r"(\n\[ERROR\] .* ERR\d+ .*)+\Z", "", text).splitlines() for text in texts)
    return " | ".join(dict.fromkeys(lines[-1][:300] for lines in logs if lines)) or "no answer"
