"""One process of a verification: it imports torch and megatron once, and forks for each run.

python -m bundle.verification.rank RANK PROCESSES DIRECTORY BACKEND
"""

import importlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from bundle import backends
from bundle.backends import Runtime
from bundle.patches import hook, patcher
from bundle.verification import WorkOrder, get_run_directory, read_orders, read_plan, write_observation
from bundle.verification.check import NotProvable, Observation

_COLLECTIVE_SECONDS = 20  # seconds until a rank gives up on another one


def main(rank: int, process_count: int, directory: Path, backend: str) -> None:
    """Run this process's share of the orders."""
    hook.remove_hook_finder()  # each run's order says which patches it has
    runtime = backends.set_up_runtime(backend)
    import bundle.verification.numbers  # noqa: F401  imports megatron, which must meet the backend

    for order in read_orders(directory):
        ranks = order.choose_ranks(process_count)
        if rank not in ranks:
            continue

        def work(order: WorkOrder = order, rank_index: int = ranks.index(rank)) -> None:
            write_observation(directory, order, rank, run(order, rank_index, directory, runtime))

        if backend == "cpu":
            fault = _run_fork_and_report_failure(work, order.seconds)
            if fault:
                write_observation(directory, order, rank, fault)
        else:  # a device cannot be used on both sides of a fork: the parent starts a process for each order
            work()


def _run_fork_and_report_failure(work: Callable[[], None], seconds: float) -> Observation | None:
    """Run `work` in a child, so that no run meets leftovers of another; return why it failed, or None."""
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
        ended_pid, status = os.waitpid(child, os.WNOHANG)
        if ended_pid:
            code = os.waitstatus_to_exitcode(status)
            return Observation(raised="Died", message=f"the run ended with code {code}") if code else None
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return Observation(raised="TimeoutError", message=f"the run took more than {seconds:.0f} s")


def run(order: WorkOrder, rank: int, directory: Path, runtime: Runtime) -> Observation:
    """Run an order's measurement on this rank, and return what the rank saw."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        return Observation(gap=_measure(order, rank, directory, runtime))
    except NotProvable as reason:
        return Observation(unprovable=str(reason))
    except Exception as error:  # noqa: BLE001  whatever megatron raises is the observation
        kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
        return Observation(raised=kinds, message=" ".join(str(error).split())[:300])


def _measure(order: WorkOrder, rank: int, directory: Path, runtime: Runtime) -> float:
    from bundle.verification.numbers import Bench

    files = get_run_directory(directory, order)
    device = runtime.select_device(rank)
    dist.init_process_group(
        runtime.collectives,
        store=dist.FileStore(str(files / "store"), order.world),
        rank=rank,
        world_size=order.world,
        timeout=timedelta(seconds=_COLLECTIVE_SECONDS),
    )
    patcher.apply(read_plan(directory, order))
    module, name = order.measurement.split(":")
    measure = getattr(importlib.import_module(module), name)
    with runtime.megatron_calls():
        return float(measure(Bench(runtime, device, files, _COLLECTIVE_SECONDS)))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
