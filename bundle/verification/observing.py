"""Runs orders in child processes, each run in a process of its own, and collects what the ranks saw."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from bundle import capabilities
from bundle.patches.plan import PatchPlan
from bundle.verification.orders import Order, answers, scratch, write_orders
from bundle.verification.result import Observation

Start = Callable[[Path, Sequence[Sequence[str]], dict[str, str], float], None]
_START = 120.0  # seconds for importing torch and megatron on a busy machine


def observe(
    orders: Sequence[Order], plan: PatchPlan, *, backend: str, root: Path | None, start: Start | None = None
) -> list[list[Observation]]:
    """What the ranks of each order saw; a rank that dies or hangs is seen as that.

    `plan`: all patches that an order may name. `root`: the directory that holds `megatron`. `start`: runs
    `bundle.verification.rank` once for each line of arguments, with this environment, at most so many
    seconds, and leaves in the directory what each wrote to its standard error, as RANK.err; None: processes.
    """
    # On the cpu a process imports everything once and forks for every run; a device survives no fork.
    portions = [list(orders)] if backend == "cpu" and orders else [[order] for order in orders]
    seen: list[list[Observation]] = []
    with tempfile.TemporaryDirectory(prefix="mcore-bundle-verify-") as name:
        for number, portion in enumerate(portions):
            seen += _portion(Path(name) / str(number), portion, plan, backend, root, start or _run)
    return seen


def _portion(
    directory: Path, orders: Sequence[Order], plan: PatchPlan, backend: str, root: Path | None, start: Start
) -> list[list[Observation]]:
    processes = max((order.world for order in orders), default=0)
    for order in orders:
        scratch(directory, order).mkdir(parents=True)
    write_orders(directory, orders, plan)
    arguments = [(str(rank), str(processes), str(directory), backend) for rank in range(processes)]
    start(directory, arguments, _environ(backend, root), _START + sum(order.seconds for order in orders))
    seen = []
    for order in orders:
        found = answers(directory, order, processes)
        if len(found) < order.world:
            found.append(Observation(raised="Died", message=_last_words(directory)))
        seen.append(found)
    return seen


def _environ(backend: str, root: Path | None) -> dict[str, str]:
    path = [*([str(root)] if root else []), *(entry or str(Path.cwd()) for entry in sys.path)]
    wanted = {variable.name: variable.value for variable in capabilities.of(backend).variables(frozenset())}
    # One host: whatever its name resolves to, gloo shall use the loopback device. And fp32 shall be fp32:
    # Transformer Engine's products would be TF32, whose rounding is larger than what must agree.
    ours = {"OMP_NUM_THREADS": "1", "NVIDIA_TF32_OVERRIDE": "0", "PYTHONPATH": os.pathsep.join(path)}
    return {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **wanted, **ours}


def _run(
    directory: Path, arguments: Sequence[Sequence[str]], environ: dict[str, str], seconds: float
) -> None:
    """Starts a process for each line of arguments and returns when all have ended, or ends them."""
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
    deadline = time.monotonic() + seconds
    try:
        for process in running:
            process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass  # what is missing is reported as such
    finally:
        for process in running:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a process and what it started, even if it has ended: forked runs leave what they started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_words(directory: Path) -> str:
    """The last line of each process's output, where it says why it ended."""
    logs = (log.read_text(errors="replace").strip().splitlines() for log in sorted(directory.glob("*.err")))
    return " | ".join(dict.fromkeys(lines[-1][:300] for lines in logs if lines)) or "no answer"
