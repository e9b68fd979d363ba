"""How far models that see images, loaded as `train` loads them, are from transformers' numbers, in a layout.

python -m tests.vision.rank DIRECTORY LAYOUT (by `reference.write`) prints an object on rank 0: case -> the
largest distances of a log-probability and of a gradient, relative to the largest of them, of a tensor. One
process also exports each model again, beside what it has loaded.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bundle import backends, pretrained
from bundle.patches import applying
from bundle.verification import decide, everything
from tests import world
from tests.families import weights
from tests.vision import reference
from tests.vision.cases import CASES, Case
from tests.vision.reference import KEPT

NAMES = ("first", "second")
ALONE, EXPORTED = "one process", "exported"
LAYOUTS: dict[str, dict[str, Any]] = {
    ALONE: {},
    "packed": {},
    "recomputed": {},
    "tp2 and sequence parallel": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "packed cp2": {"cp": 2},
    "packed tp2": {"tp": 2, "sequence_parallel": True},
}


def main(directory: Path, layout: str) -> None:
    torch.set_num_threads(1)
    applying.apply(everything(decide("cpu")))
    runtime = backends.prepare("cpu")
    rank = world.join()
    with runtime.megatron():
        cases = ((case.name, case) for case in CASES if (directory / case.name).is_dir())
        found = world.each(cases, lambda case: distances(case, directory / case.name, layout, runtime))
    if rank == 0:
        print(json.dumps(found))


def distances(case: Case, directory: Path, layout: str, runtime) -> tuple[float, float]:
    from bundle.engine import Engine
    from bundle.mcore import groups
    from bundle.models import exporting
    from bundle.recipe import from_mapping

    packed = layout.startswith("packed")
    recompute = {"recompute": {"granularity": "full"}} if layout == "recomputed" else {}
    job = from_mapping(
        {
            "name": "seen",
            "task": "sft",
            "backend": "cpu",
            "model": {"path": str(directory), "dtype": "fp32", **recompute},
            "parallel": LAYOUTS[layout],
            "data": {
                "source": "jsonl",
                "path": ["none"],
                "sequence_length": 128,
                "tokenizer": "hf:none",
                "template": "chat",
                "packed": packed,
            },
            "train": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1},
            "optimizer": {"warmup_steps": 0, "use_distributed_optimizer": False},
        }
    )
    made = groups.initialize(job.parallel, seed=1, timeout_seconds=60)
    engine = Engine(job, runtime, made, torch.device("cpu"), pretrained.of_recipe(job))
    _, numbers = reference.read(directory)
    given, wanted = batch(engine, numbers, packed=packed)
    seen = engine.log_probs([given])[0].log_probs.flatten()
    engine.forward_backward([given])
    of_log_probs = (seen - wanted).abs().max() / wanted.abs().max()
    of_gradients = gradients(engine, reference.tensors(directory / reference.GRADIENTS))
    worst = torch.stack([of_log_probs.float(), of_gradients.float()])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)  # of numbers alone: NaN stays on rank 0, or ends nothing
    if layout == ALONE:
        exporting.export(directory / EXPORTED, job, engine.models, made)
    groups.destroy()
    first, second = worst.tolist()
    return first, second


def batch(engine, numbers: dict[str, torch.Tensor], *, packed: bool):
    """Both sequences as one micro-batch, and their log-probabilities: rows, or a pack of whole and part."""
    from bundle.engine.microbatch import from_packing, from_rows
    from bundle.sequences.images import Images
    from bundle.sequences.packing import Packing

    cp, architecture = engine.groups.cp, engine.recipe.architecture
    first, second = numbers["first ids"], numbers["second ids"]
    lengths = [len(first) - 1, KEPT if packed else len(second) - 1]
    ids = torch.cat([first[:-1], second[: lengths[1]]])
    labels = torch.cat([first[1:], second[1 : lengths[1] + 1]])
    mask = (torch.arange(len(ids)) < lengths[0] + KEPT).float()
    wanted = torch.cat([numbers["first log-probs"], numbers["second log-probs"][: lengths[1]]])
    pixels, grids = (torch.cat([numbers[f"{n} {of}"] for n in NAMES]) for of in ("pixels", "grids"))
    images = Images.of(pixels, grids.numpy(), ids.numpy(), np.asarray(lengths), architecture.vision)
    options: dict[str, Any] = {"mtp_layers": 0, "images": images}
    if packed:
        packing = Packing.of(lengths, engine.recipe.alignment, rank=cp.rank)
        return from_packing(ids, labels, mask, packing, **options), wanted
    rows = (x.view(2, -1) for x in (ids, labels, mask))
    return from_rows(*rows, cp=cp.size, rank=cp.rank, **options), wanted


def gradients(engine, theirs: dict[str, torch.Tensor]) -> torch.Tensor:
    """How far this rank's gradients are from theirs, of the tower too."""
    from bundle.models import naming

    found = []
    for model in engine.models:
        for named in naming.parameters(model, engine.groups):
            wanted = of_theirs(named.name, theirs, engine.recipe.architecture)
            whole = torch.zeros(named.whole_shape())
            whole[: len(wanted)] = wanted
            part = named.shard.of(whole) if named.shard else whole
            far = (named.parameter.main_grad - part).abs().max()
            found.append(far / wanted.abs().max().clamp(min=1e-20))
    return torch.stack(found).max()


def of_theirs(name: str, theirs: dict[str, torch.Tensor], architecture) -> torch.Tensor:
    """Their tensor for one of ours."""
    if name.startswith("vision.tower."):
        return theirs[f"visual.{name.removeprefix('vision.tower.')}"]
    return weights.ours(name, theirs, architecture)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
