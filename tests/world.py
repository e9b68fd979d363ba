"""Real ranks for tests: processes over gloo on this machine that run one module and end together.

A World is one process that imports once what its ranks need, and forks for each rank of each run: to import
torch and megatron-core takes longer than what most runs do.
"""

import datetime
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from bundle import capabilities
from bundle.patches.plan import PatchPlan
from bundle.verification import ProcessStarter, WorkOrder, run_orders
from bundle.verification.check import Observation

if TYPE_CHECKING:
    import torch

    from bundle.backends import Runtime

ROOT = Path(__file__).parents[1]
RANK, SIZE, STORE = "TEST_WORLD_RANK", "TEST_WORLD_SIZE", "TEST_WORLD_STORE"
BACKEND = "TEST_WORLD_BACKEND"
Case = TypeVar("Case")
Seen = TypeVar("Seen")
_START = 180.0  # seconds for importing torch and megatron on a busy machine


class World:
    """Runs modules on forked ranks, with the megatron-core of `tree`, or with the importable one.

    `megatron`: whether that is imported before the ranks are forked; their patches then meet what is
    imported, and without it are applied while it is imported, as in a job. `environ`: of the process and its
    ranks, where BACKEND says which one they are (the cpu).
    """

    def __init__(
        self, tree: Path | None = None, *, megatron: bool = False, environ: dict[str, str] | None = None
    ) -> None:
        self.tree = tree
        self._environ = environ or {}
        self._modules = ("torch", *(("tests.imported",) if megatron else ()))
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "World":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the process and whatever runs in it."""
        if self._process is not None:
            self._process.terminate()
            self._process.communicate()
            self._process = None

    def run(
        self,
        module: str,
        size: int,
        *arguments: str,
        timeout: float = 120,
        environ: dict[str, str] | None = None,
    ) -> list[str]:
        """What each of `size` ranks of `python -m module arguments` printed; fails with the errors of any."""
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            environment = {SIZE: str(size), STORE: f"{name}/store", **(environ or {})}
            codes = self._codes(directory, module, [arguments] * size, environment, timeout)
            wrong = [
                f"rank {rank} ended with {code}:\n{(directory / f'{rank}.err').read_text()[-3000:]}"
                for rank, code in enumerate(codes)
                if code != 0
            ]
            where = self.tree.name if self.tree else "the installed release"
            assert not wrong, "\n".join([f"{module} {' '.join(arguments)[:200]} on {where}", *wrong])
            return [(directory / f"{rank}.out").read_text() for rank in range(size)]

    def observe(self, orders: Sequence[WorkOrder], plan: PatchPlan) -> list[list[Observation]]:
        """What `observe` returns, whose processes are ranks of this world."""
        return observe(orders, plan, backend="cpu", root=self.tree, start=self.start)

    def start(
        self, directory: Path, arguments: Sequence[Sequence[str]], environ: dict[str, str], seconds: float
    ) -> None:
        """Starts what verifies patches as ranks of this world: see `bundle.verification.run_orders`."""
        self._codes(directory, "bundle.verification.rank", arguments, environ, seconds)

    def _codes(
        self,
        directory: Path,
        module: str,
        arguments: Sequence[Sequence[str]],
        environ: dict[str, str],
        seconds: float,
    ) -> list[int]:
        """How each rank ended; what it printed lies in `directory`, by rank, as .out and .err."""
        process = self._process = self._process or self._started()
        assert process.stdin is not None and process.stdout is not None
        order = {
            "directory": str(directory),
            "module": module,
            "arguments": [list(words) for words in arguments],
            "environ": environ,
            "seconds": seconds,
        }
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], _START + seconds)
        said = process.stdout.readline() if ready else ""
        if not said:
            self.__exit__(None, None, None)
            raise AssertionError(f"the process that forks ranks of {module} ended, or imports without end")
        codes: list[int] = json.loads(said)
        return codes

    def _started(self) -> "subprocess.Popen[str]":
        given = self._environ.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
        path = [str(ROOT), *([str(self.tree)] if self.tree else []), *([given] if given else [])]
        environment = (
            os.environ
            | self._environ
            | {
                "PYTHONPATH": os.pathsep.join(path),
                "OMP_NUM_THREADS": "1",
                # One host: whatever its name resolves to, gloo shall use the loopback device.
                "GLOO_SOCKET_IFNAME": "lo",
            }
        )
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.forking", *self._modules],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


@dataclass(frozen=True)
class Core:
    """A megatron-core and a world of ranks that have imported it; `tree` is None for the installed one."""

    version: str
    tree: Path | None
    world: World


def observe(
    orders: Sequence[WorkOrder],
    plan: PatchPlan,
    *,
    backend: str,
    root: Path | None,
    start: ProcessStarter | None = None,
) -> list[list[Observation]]:
    """What the ranks of each order saw, when all have been carried out; see verification's `observed`."""
    found = run_orders(orders, plan, backend=backend, root=root, start=start)
    seen = {order.number: answers for order, answers in found}
    return [seen[order.number] for order in orders]


def backend() -> str:
    """The backend of this process, which a world may say."""
    return os.environ.get(BACKEND, "cpu")


def device(runtime: "Runtime") -> "torch.device":
    """The device of this rank, made current."""
    return runtime.select_device(int(os.environ[RANK]))


def join(seconds: float = 60) -> int:
    """This process's rank, after all ranks have met; called by the module that `run` runs."""
    import torch.distributed as dist

    rank, size = int(os.environ[RANK]), int(os.environ[SIZE])
    dist.init_process_group(
        capabilities.find_capabilities(backend()).collectives,
        init_method=f"file://{os.environ[STORE]}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=seconds),
    )
    return rank


def each(cases: Iterable[tuple[str, Case]], body: Callable[[Case], Seen]) -> dict[str, Seen]:
    """What `body` returns of each case, by its name; an error says which one it was."""
    seen = {}
    for name, case in cases:
        try:
            seen[name] = body(case)
        except BaseException as error:
            error.add_note(f"in the case {name!r}")
            raise
    return seen
