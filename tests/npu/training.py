"""One rank that trains tiny models a few steps in each case, on the backend of its world.

python -m tests.npu.training [mindspeed] NAME...   (of a case; with mindspeed, through its layers)
"""

import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from bundle.recipe import Recipe
from tests import world
from tests.backends.cpu.smoke import VOCABULARY, recipe
from tests.ranks import finish_rank, plan_patches, start_rank

STEPS, MICRO_BATCHES, ROWS, LENGTH = 2, 4, 2, 32
LENGTHS = (11, 1, 20, 5)


@dataclass(frozen=True)
class Case:
    """A model in a layout; packed sequences, or rows."""

    name: str
    model: str
    parallel: dict[str, int] = field(default_factory=dict)
    packed: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # of the recipe's section `model`
    mindspeed: bool = False

    @property
    def ranks(self) -> int:
        """How many train it."""
        return 2 if self.parallel else 1

    def recipe(self) -> Recipe:
        """The job of this case."""
        data = {"source": "text", "path": ["stdlib"], "sequence_length": 64, "packed": self.packed}
        batch = {"micro_batch_size": 1 if self.packed else ROWS}
        batch["global_batch_size"] = batch["micro_batch_size"] * MICRO_BATCHES
        return recipe(
            self.model,
            model=self.options,
            parallel=self.parallel,
            data=data,
            train={"steps": STEPS, **batch},
            backend_options={"mindspeed": self.mindspeed},
        )


FULL = {"recompute": {"granularity": "full"}}
LAYOUTS: dict[str, dict[str, dict[str, int]]] = {
    "dense": {"": {}, " tp2": {"tp": 2}, " pp2": {"pp": 2}, " cp2": {"cp": 2}},
    "latent": {
        "": {},
        " tp2": {"tp": 2, "ep": 2, "etp": 1},
        " pp2": {"pp": 2},
        " cp2": {"cp": 2},
        " ep2": {"ep": 2},
    },
}
CASES = (
    *(
        Case(f"{model}{' packed' * packed}{layout}", model, parallel, packed)
        for model, layouts in LAYOUTS.items()
        for packed in (False, True)
        for layout, parallel in layouts.items()
    ),
    Case("dense recomputed", "dense", options=FULL),
    Case("dense pp2, recomputed", "dense", {"pp": 2}, options=FULL),
    Case("dense packed cp2, recomputed", "dense", {"cp": 2}, packed=True, options=FULL),
    Case("latent tp2, recomputed", "latent", LAYOUTS["latent"][" tp2"], options=FULL),
    Case("latent packed, recomputed", "latent", packed=True, options=FULL),
    Case("latent packed ep2, recomputed", "latent", {"ep": 2}, packed=True, options=FULL),
    Case("dense unfused", "dense", options={"attention": "unfused"}),
    Case("dense without operators", "dense", options={"operators": []}),
    Case("latent without operators", "latent", options={"operators": []}),
    Case("dense bf16", "dense", options={"dtype": "bf16"}),
    Case("latent bf16", "latent", options={"dtype": "bf16"}),
    Case("latent bf16 tp2", "latent", LAYOUTS["latent"][" tp2"], options={"dtype": "bf16"}),
    Case("dense ranks of data", "dense", {"ep": 1, "pp": 1, "tp": 1, "cp": 1}),
)

# MindSpeed multiplies experts in bf16 alone.
OF_MINDSPEED = (Case("latent bf16 pp2", "latent", {"pp": 2}, options={"dtype": "bf16"}),)


def main(names: list[str]) -> None:
    through = "mindspeed" in names
    cases = [replace(case, mindspeed=through) for case in (*CASES, *OF_MINDSPEED) if case.name in names]
    runtime, rank = start_rank(plan_patches(cases), cases[0].recipe())
    seen = world.each(((case.name, case) for case in cases), lambda case: (train(case, runtime), operators()))
    losses, called = ({name: each[part] for name, each in seen.items()} for part in (0, 1))
    finish_rank({"losses": losses, "operators": called}, rank)


def train(case: Case, runtime: Any) -> list[list[float]]:
    """[main loss, MTP losses.., gradient norm] of each step."""
    from bundle.engine import Engine
    from bundle.mcore import groups

    job = case.recipe()
    device = world.device(runtime)
    with runtime.megatron_calls():
        state = groups.create_model_parallel_groups(job.parallel, seed=job.seed, timeout_seconds=60)
    engine = Engine(job, runtime, state, device)
    assert all(p.device == device for model in engine.models for p in model.parameters())
    each = MICRO_BATCHES // state.dp.size
    mine = range(state.dp.rank * each, (state.dp.rank + 1) * each)
    batches = [micro_batch(case, job, state, number, device) for number in mine]
    seen = []
    for _ in range(STEPS):
        engine.forward_backward(batches)
        result = engine.step_optimizer()
        losses = engine.take_losses()
        seen.append([losses.main, *losses.mtp, result.grad_norm])
    groups.destroy_model_parallel_groups()
    return seen


def micro_batch(case: Case, job: Recipe, state: Any, number: int, device: torch.device) -> Any:
    """Micro-batch `number` of the step, the same tokens in every layout."""
    from bundle.engine.microbatch import from_packing, from_rows
    from bundle.packing.packing import Packing

    generator, depths = torch.Generator().manual_seed(number), job.architecture.mtp_layers
    if case.packed:
        ids, labels = torch.randint(0, VOCABULARY, (2, sum(LENGTHS)), generator=generator).to(device)
        packing = Packing.from_lengths(LENGTHS, job.alignment, rank=state.cp.rank, device=device)
        mask = torch.ones(len(ids), device=device)
        return from_packing(ids, labels, mask, packing, mtp_layers=depths)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator).to(device)
    mask = torch.ones(ROWS, LENGTH, device=device)
    cp = state.cp
    return from_rows(tokens[:, :-1], tokens[:, 1:], mask, cp=cp.size, rank=cp.rank, mtp_layers=depths)


def operators() -> dict[str, int]:
    """How often ranks called each emulated operator of torch-npu since the last call; none on the cpu."""
    kernels = sys.modules.get("tests.npu.emulation.kernels")
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, Counter(kernels.called) if kernels else Counter())
    if kernels:
        kernels.called.clear()
    return dict(sum(found, Counter()))


if __name__ == "__main__":
    main(sys.argv[1:])
