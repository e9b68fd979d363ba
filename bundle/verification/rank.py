"""One process of a verification: imports torch and megatron once, and forks for each run.

python -m bundle.verification.rank RANK PROCESSES DIRECTORY BACKEND
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bundle import backends
from bundle.patches import hook
from bundle.verification.check import Observation
from bundle.verification.observing import Order, answer, read_orders


def main(rank: int, processes: int, directory: Path, backend: str) -> None:
    """Runs this process's share of the orders."""
    hook.leave()  # what is patched in which run is said by its order
    runtime = backends.prepare(backend)
    from bundle.verification.running import run  # imports megatron, which must meet the backend

    for order in read_orders(directory):
        ranks = order.ranks(processes)
        if rank not in ranks:
            continue

        def work(order: Order = order, place: int = ranks.index(rank)) -> None:
            answer(directory, order, rank, run(order, place, directory, runtime))

        if backend == "cpu":
            fault = _in_fork(work, order.seconds)
            if fault:
                answer(directory, order, rank, fault)
        else:  # a device cannot be used on both sides of a fork: the parent starts a process for each order
            work()


def _in_fork(work: Callable[[], None], seconds: float) -> Observation | None:
    """Runs `work` in a child, so that no run meets what another one left; returns why it did not end well."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return Observation(raised="Died", message=f"the run ended with status {code}") if code else None
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return Observation(raised="TimeoutError", message=f"the run took more than {seconds:.0f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
