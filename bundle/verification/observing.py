"""Runs orders in child processes, each run in a process of its own, and collects what the ranks saw."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bundle import capabilities, files
from bundle.patches import plan
from bundle.patches.plan import PatchPlan
from bundle.verification.check import Observation

Start = Callable[[Path, Sequence[Sequence[str]], dict[str, str], float], None]
_Process = subprocess.Popen[bytes]
_ORDERS, _PLAN = "orders.json", "patches.json"
_START = 120.0  # seconds for importing torch and megatron on a busy machine
_PAUSE = 0.05  # seconds between two looks at the answers


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


def write_orders(directory: Path, orders: Sequence[Order], of: PatchPlan) -> None:
    """Lays the orders down, and the plan of all patches that they may name."""
    (directory / _PLAN).write_text(json.dumps(of.dump()))
    (directory / _ORDERS).write_text(json.dumps([asdict(order) for order in orders]))


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
    write_orders(directory, orders, plan)
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
        died = Observation(raised="Died", message=_last_words(directory))
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


def _last_words(directory: Path) -> str:
    """The last line of each process's output, where it says why it ended."""
    logs = (log.read_text(errors="replace").strip().splitlines() for log in sorted(directory.glob("*.err")))
    return " | ".join(dict.fromkeys(lines[-1][:300] for lines in logs if lines)) or "no answer"
