"""Whose values set a scale over ranks: the largest of all ranks that share it."""

import math

import torch
import torch.distributed as dist

from bundle.backends.cpu.scaling import (
    E4M3,
    DelayedQuantiser,
    FirstMicroBatchWeightQuantiser,
    ForwardPassPurpose,
)
from bundle.mcore import context
from bundle.recipe import Recipe, from_mapping
from bundle.verification.numbers import DENSE_HF_CONFIG, Bench, find_worst
from tests.engine.experiments import EVEN, engine, micro_batches
from tests.engine.reference import texts

LARGEST = {0: (7.0, 28.0, 0.0), 1: (14.0, 3.5, 56.0)}  # of each call, by rank: 14, 28 and 56 of both
WANTED = (32.0, 16.0, 8.0)  # 448 over them: the scale of the call after


def calls(bench: Bench) -> float:
    """How far the scales of an input and of a weight are, with a run of the schedule for each call."""
    x = torch.zeros(2, 2, device=bench.device)
    gaps = []
    for quantiser in (
        DelayedQuantiser(E4M3, dist.group.WORLD),
        FirstMicroBatchWeightQuantiser(E4M3, dist.group.WORLD),
    ):
        for value, wanted in zip(LARGEST[dist.get_rank()], WANTED, strict=True):
            with context.schedule_run.set(object()):
                quantiser(x + value, ForwardPassPurpose.TRAINED)
            gaps.append((quantiser.scale / wanted - 1).abs())
    return find_worst(gaps)


def layers(bench: Bench) -> float:
    """Infinite if a layer of two data-parallel ranks, which see different texts, has two scales."""
    with engine(bench, _job()) as made:
        made.forward_backward(micro_batches(made, texts(EVEN), "rows", "token"))
        operands = [
            module._quantisers for module in made.models[0].modules() if hasattr(module, "_quantisers")
        ]
        kinds = [each for of in operands for each in (of.input, of.weight, of.gradient)]
        mine = torch.tensor([max(each.history) for each in kinds])
        seen = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(seen, mine)
        return 0.0 if len(operands) == 8 and torch.equal(*seen) else math.inf


def _job() -> Recipe:
    return from_mapping(
        {
            "name": "shared",
            "model": {"config": DENSE_HF_CONFIG, "dtype": "bf16", "fp8": {"scaling": "delayed"}},
            "data": {"source": "text", "path": ["none"], "tokenizer": "hf:none", "sequence_length": 24},
            "train": {"steps": 2, "global_batch_size": 4},
        },
    )
