"""Trains the tiny models in bf16 and in FP8 and prints what was seen as JSON.

python -m tests.backends.cpu.fp8.training CASE...
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bundle.errors import JobFailed
from bundle.fp8 import Scaling
from bundle.packing.packing import Packing
from bundle.planning import build_plan
from bundle.recipe import Recipe
from bundle.recipe.alignment import Alignment
from tests import world
from tests.backends.cpu import smoke
from tests.ranks import finish_rank, start_rank

# Multiples of 32 also in two parts, as mxfp8 wants them.
WIDER = {"dense": {}, "latent": {"qk_rope_head_dim": 32, "qk_nope_head_dim": 16, "moe_intermediate_size": 64}}
FULL = {"granularity": "full", "method": "uniform", "layers": 1}


class Casts(TorchDispatchMode):
    """Counts the tensors that are rounded to 8 bits, by dtype: the products' operands."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = (kwargs or {}).get("dtype")
        if func is torch.ops.aten._to_copy.default and dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            self.seen[str(dtype).removeprefix("torch.float8_")] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def weight_scales() -> Iterator[dict[int, list[float]]]:
    """The scale that each delayed weight was rounded by in each micro-batch, by layer."""
    from bundle.backends.cpu.scaling import FirstMicroBatchWeightQuantiser

    seen: dict[int, list[float]] = defaultdict(list)
    original = FirstMicroBatchWeightQuantiser._get_scale_and_advance

    def told(self: Any, x: torch.Tensor, phase: Any) -> torch.Tensor:
        scale = original(self, x, phase)
        seen[id(self)].append(float(scale))
        return scale

    FirstMicroBatchWeightQuantiser._get_scale_and_advance = told  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        FirstMicroBatchWeightQuantiser._get_scale_and_advance = original  # type: ignore[method-assign]


def recipe(case: str) -> Recipe:
    """The job of a case: "MODEL SCALING", and what else is set.

    "tp2", "full" recomputation, "adapters", how packed.
    """
    model, scaling, *more = case.split()
    arithmetic: dict[str, Any] = {"dtype": "bf16"}
    if scaling != "bf16":
        arithmetic["fp8"] = {"scaling": scaling}
    if "full" in more:
        arithmetic["recompute"] = FULL
    if "adapters" in more:
        arithmetic["lora"] = {"rank": 8, "alpha": 16}
    return smoke.recipe(model, WIDER[model], model=arithmetic, parallel={"tp": 2 if "tp2" in more else 1})


def packs(job: Recipe, scaling: Scaling | None) -> list[Any]:
    """One micro-batch of three sequences, 43 tokens, padded as `scaling` wants it."""
    from bundle.engine.microbatch import from_packing

    lengths = (9, 21, 13)
    tokens = torch.randint(0, smoke.VOCABULARY, (2, sum(lengths)), generator=torch.Generator().manual_seed(9))
    packing = Packing.from_lengths(lengths, Alignment(scaling=scaling))
    mask = torch.ones(sum(lengths))
    return [from_packing(tokens[0], tokens[1], mask, packing, mtp_layers=job.architecture.mtp_layers)]


def train(case: str, job: Recipe, runtime: Any) -> dict[str, Any]:
    """Losses of each step and the operands that were rounded; or why it was refused."""
    batches = None
    if "packed" in case:
        fp8 = job.model.fp8
        batches = packs(job, fp8.scaling if fp8 and "unpadded" not in case else None)
    with Casts() as casts, weight_scales() as scales:
        try:
            losses = smoke.train(job, runtime, batches)
        except JobFailed as refused:
            return {"refused": refused.violations}
    return {"losses": losses, "casts": casts.seen, "weight_scales": list(scales.values())}


def main(cases: list[str]) -> None:
    jobs = {case: recipe(case) for case in cases}
    largest = max(jobs.values(), key=lambda job: len(job.features))
    runtime, rank = start_rank(build_plan(largest, backend="cpu").patch_plan)
    seen = world.each(zip(cases, cases, strict=True), lambda case: train(case, jobs[case], runtime))
    finish_rank(seen, rank)


if __name__ == "__main__":
    main(sys.argv[1:])
