"""What the ranks of these tests have in common: a world of gloo processes, a tiny engine, and its steps."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bundle import backends
from bundle.patches import applying
from tests.matrix.cases import LENGTH, ROWS, VOCABULARY, Case
from tests.matrix.rank import patches

ROOT = Path(__file__).parents[2]


def launch(module: str, folder: Path, world: int, plan: Any, tree: Path | None = None) -> Any:
    """Returns what rank 0 of `python -m module` wrote down; fails with the errors of the ranks."""
    path = [str(p) for p in (ROOT, tree, os.environ.get("PYTHONPATH")) if p]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = []
    for rank in range(world):
        command = [sys.executable, "-m", module, str(rank), str(world), str(folder), json.dumps(plan)]
        errors = (folder / f"errors-{rank}").open("wb")
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=errors))
    try:
        codes = [rank.wait(timeout=300) for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
    logs = [(folder / f"errors-{rank}").read_text()[-3000:] for rank in range(world)]
    assert codes == [0] * world, "\n".join(logs)
    return json.loads((folder / "results").read_text())


def take_part(arguments: list[str], cases: list[Case], body: Callable[[Any, Path, Any], Any]) -> None:
    """Runs `body(runtime, folder, plan)` as one rank; what it returns on rank 0 is what `launch` returns."""
    rank, world, folder = int(arguments[1]), int(arguments[2]), Path(arguments[3])
    torch.set_num_threads(1)
    applying.apply(patches(cases))
    runtime = backends.prepare("cpu")
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    found = body(runtime, folder, json.loads(arguments[4]))
    if rank == 0:
        (folder / "results").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def make_engine(case: Case, runtime: Any) -> Any:
    """Returns an engine with new weights; the groups of an earlier one are forgotten."""
    from bundle.engine import Engine
    from bundle.mcore import groups

    recipe = case.recipe()
    with runtime.megatron():
        groups.destroy()
        state = groups.initialize(recipe.parallel, seed=recipe.seed, timeout_seconds=60)
    return Engine(recipe, runtime, state, torch.device("cpu"))


def train_step(engine: Any, step: int) -> list[float]:
    """Returns [main loss, MTP losses.., gradient norm] of one step, whose rows depend only on its number."""
    engine.forward_backward(_micro_batches(engine, step))
    result = engine.step()
    losses = engine.take_losses()
    return [losses.main, *losses.mtp, result.grad_norm]


def _micro_batches(engine: Any, step: int) -> list[Any]:
    from bundle.engine.microbatch import from_rows

    groups, generator = engine.groups, torch.Generator().manual_seed(step)
    rows = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    weights = (torch.rand(ROWS, LENGTH, generator=generator) > 0.2).float()
    share = ROWS // groups.dp.size
    mine = slice(groups.dp.rank * share, (groups.dp.rank + 1) * share)
    layers = engine.recipe.architecture.mtp_layers
    pairs = zip(rows[mine].split(2), weights[mine].split(2), strict=True)
    return [
        from_rows(row[:, :-1], row[:, 1:], mask, cp=groups.cp.size, rank=groups.cp.rank, mtp_layers=layers)
        for row, mask in pairs
    ]
