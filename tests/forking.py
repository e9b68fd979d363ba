"""The process of a tests.world.World: imports modules, and forks ranks as it is told.

python -m tests.forking MODULE...

An order is a line of JSON on the standard input (World._codes writes it) with a list of words for each rank;
the answer is a line with their exit codes.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.world import RANK


def serve() -> None:
    """Runs order after order, until there are no more."""
    # Only answers go to the standard output, whatever an import prints.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        order = json.loads(line)
        ranks: list[int] = []
        for rank in range(len(order["arguments"])):
            if not (child := os.fork()):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                work(rank, **order)
                return
            ranks.append(child)
        print(json.dumps(ended(ranks, time.monotonic() + order["seconds"])), file=answers, flush=True)


def work(
    rank: int, directory: str, module: str, arguments: list[list[str]], environ: dict[str, str], **_: Any
) -> None:
    """The rank itself: a session and a standard input and output of its own, then `python -m module`."""
    os.setsid()
    for number, name in ((1, "out"), (2, "err")):
        with (Path(directory) / f"{rank}.{name}").open("wb") as file:
            os.dup2(file.fileno(), number)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.environ.update(environ | {RANK: str(rank)})
    sys.argv = [module, *arguments[rank]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def ended(ranks: list[int], deadline: float) -> list[int]:
    """Exit codes, when all have ended; ends them when one has failed or time is up, and what they started."""
    codes: dict[int, int] = {}
    try:
        while len(codes) < len(ranks):
            for rank in ranks:
                if rank not in codes and (status := os.waitpid(rank, os.WNOHANG))[0]:
                    codes[rank] = os.waitstatus_to_exitcode(status[1])
            if any(codes.values()) or time.monotonic() > deadline:
                time.sleep(1)  # the others may be about to say why
                kill(rank for rank in ranks if rank not in codes)
            time.sleep(0.02)
    finally:
        kill(ranks)
    return [codes[rank] for rank in ranks]


def kill(ranks: Iterable[int]) -> None:
    """Ends the ranks and whatever they have started."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank, signal.SIGKILL)


if __name__ == "__main__":
    serve()
