"""What the ranks of these tests have in common: a world of gloo processes, a tiny engine, and its steps."""

import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from tests import world
from tests.matrix.cases import LENGTH, ROWS, VOCABULARY, Case
from tests.ranks import finish_rank, plan_patches, start_rank
from tests.world import Core


def launch(module: str, folder: Path, size: int, plan: Any, core: Core) -> Any:
    """Returns what rank 0 of `python -m module` found; fails with the errors of the ranks."""
    seconds = 300 + 30 * len(plan or ())  # a machine may have less than a core for each rank
    return json.loads(core.world.run(module, size, str(folder), json.dumps(plan), timeout=seconds)[0])


def take_part(cases: list[Case], body: Callable[[Any, Path, Any], Any]) -> None:
    """Runs `body(runtime, folder, plan)` as one rank; what it returns on rank 0 is what `launch` returns."""
    runtime, rank = start_rank(plan_patches(cases))
    with redirect_stdout(sys.stderr):
        found = body(runtime, Path(sys.argv[1]), json.loads(sys.argv[2]))
    finish_rank(found, rank)


def make_engine(case: Case, runtime: Any) -> Any:
    """Returns an engine with new weights; the groups of an earlier one are forgotten."""
    from bundle.engine import Engine
    from bundle.mcore import groups

    recipe = case.recipe()
    with runtime.megatron_calls():
        groups.destroy_model_parallel_groups()
        state = groups.create_model_parallel_groups(recipe.parallel, seed=recipe.seed, timeout_seconds=60)
    return Engine(recipe, runtime, state, world.device(runtime))


def train_step(engine: Any, step: int) -> list[float]:
    """Returns [main loss, MTP losses.., gradient norm] of one step, whose rows depend only on its number."""
    engine.forward_backward(_micro_batches(engine, step))
    result = engine.step_optimizer()
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
    here = (x[mine].to(engine.device).split(2) for x in (rows, weights))
    pairs = zip(*here, strict=True)
    return [
        from_rows(row[:, :-1], row[:, 1:], mask, cp=groups.cp.size, rank=groups.cp.rank, mtp_layers=layers)
        for row, mask in pairs
    ]
