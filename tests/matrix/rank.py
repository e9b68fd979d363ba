"""One rank that trains each case a few steps and prints what it saw.

python -m tests.matrix.rank CASES   (a JSON list of cases of tests.matrix.cases); see tests.world.
"""

import json
import sys

import torch
import torch.distributed as dist

from tests import world
from tests.matrix.cases import LENGTH, ROWS, STEPS, VOCABULARY, Case
from tests.ranks import finish_rank, plan_patches, start_rank


def main(cases: list[Case]) -> None:
    runtime, rank = start_rank(plan_patches(cases))
    seen = world.each(((case.name, case) for case in cases), lambda case: train(case, runtime))
    finish_rank(seen, rank)


def train(case: Case, runtime) -> list[list[float]]:
    """[main loss, MTP losses.., scores, gradient norm] of each step; the score leaves MTP out."""
    from bundle.engine import Engine
    from bundle.engine.microbatch import from_rows
    from bundle.mcore import groups

    recipe = case.recipe()
    with runtime.megatron_calls():
        state = groups.create_model_parallel_groups(recipe.parallel, seed=recipe.seed, timeout_seconds=60)
    device = world.device(runtime)
    engine = Engine(recipe, runtime, state, device)
    rows = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(7))
    weights = (torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(8)) > 0.2).float()
    mine = slice(state.dp.rank * ROWS // state.dp.size, (state.dp.rank + 1) * ROWS // state.dp.size)
    micro_batches = [
        from_rows(
            tokens[:, :-1],
            tokens[:, 1:],
            mask,
            cp=state.cp.size,
            rank=state.cp.rank,
            mtp_layers=recipe.architecture.mtp_layers,
        )
        for tokens, mask in zip(
            rows[mine].to(device).split(2), weights[mine].to(device).split(2), strict=True
        )
    ]
    seen = []
    for _ in range(STEPS):
        engine.forward_backward(micro_batches)
        result = engine.step_optimizer()
        losses = engine.take_losses()
        scores = torch.stack(
            [one.log_probs.double().sum() for one in engine.compute_log_probs(micro_batches)]
        ).sum()
        dist.all_reduce(scores, group=state.dp.group)
        seen.append([losses.main, *losses.mtp, float(scores), result.grad_norm])
    groups.destroy_model_parallel_groups()
    return seen


if __name__ == "__main__":
    main([Case(**case) for case in json.loads(sys.argv[1])])
