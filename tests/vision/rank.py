"""How far models that see images, loaded as `train` loads them, are from transformers' numbers, in a layout.

python -m tests.vision.rank DIRECTORY LAYOUT (by `reference.write`) prints an object on rank 0: case -> the
largest distances of a log-probability and of a gradient, relative to the largest of them, of a tensor, and of
a log-probability, an entropy or the loss [nats]. One process also exports each model again, beside what it
has loaded.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bundle import pretrained
from bundle.architectures import from_config
from bundle.recipe import Recipe, from_mapping
from tests import world
from tests.families import weights
from tests.ranks import finish_rank, start_rank
from tests.vision import reference
from tests.vision.cases import CASES, Case
from tests.vision.reference import KEPT

NAMES = ("first", "second")
ALONE, EXPORTED = "one process", "exported"
LAYOUTS: dict[str, dict[str, Any]] = {
    ALONE: {},
    "packed": {},
    "recomputed pp2": {"pp": 2},  # the first stage has both sequences under way when it recomputes one
    "tp2 and sequence parallel": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "recomputed pp2 laid out": {"pp": 2, "pipeline_model_parallel_layout": "Ett|t|t|L"},
    "ep2": {"ep": 2},
    "cp2": {"cp": 2},
    "packed cp2": {"cp": 2},
    "packed tp2": {"tp": 2, "sequence_parallel": True},
}


def main(directory: Path, layout: str) -> None:
    runtime, rank = start_rank()
    with runtime.megatron_calls():
        cases = ((case.name, case) for case in cases_of(layout) if (directory / case.name).is_dir())
        found = world.each(cases, lambda case: distances(case, directory / case.name, layout, runtime))
    finish_rank(found, rank)


def cases_of(layout: str) -> list[Case]:
    """All, or those with experts to divide, or with as many layers as are laid out."""
    if layout.endswith("laid out"):
        return [case for case in CASES if from_config(case.config).num_layers == 4]
    return [case for case in CASES if layout != "ep2" or "moe" in case.family]


def distances(case: Case, directory: Path, layout: str, runtime) -> tuple[float, float, float]:
    from bundle.engine import Engine
    from bundle.mcore import groups
    from bundle.models import exporting

    packed, apart = layout.startswith("packed"), layout.startswith("recomputed")
    job = recipe(directory, LAYOUTS[layout], packed=packed, recomputed=apart)
    device = world.device(runtime)
    made = groups.create_model_parallel_groups(job.parallel, seed=1, timeout_seconds=60)
    engine = Engine(job, runtime, made, device, pretrained.find_recipe_weights(job))
    _, numbers = reference.read(directory)
    sequences = [(name,) for name in NAMES] if apart else [NAMES]
    given = [batch(engine, numbers, names, packed=packed) for names in sequences]
    seen = engine.compute_log_probs(given)
    engine.take_losses()
    engine.forward_backward(given)
    far = {
        what: torch.cat([getattr(one, field).flatten() for one in seen]).cpu() - wanted(numbers, what, packed)
        for what, field in (("log-probs", "log_probs"), ("entropies", "entropy"))
    }
    of_log_probs = far["log-probs"].abs().max() / wanted(numbers, "log-probs", packed).abs().max()
    of_gradients = gradients(engine, reference.tensors(directory / reference.GRADIENTS))
    of_loss = torch.tensor(engine.take_losses().main) - numbers["loss"]
    of_nats = torch.stack([*(each.abs().max().double() for each in far.values()), of_loss.abs().double()])
    worst = torch.stack([of_log_probs.float(), of_gradients.float(), of_nats.max().float()]).to(device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)  # of numbers alone: NaN stays on rank 0, or ends nothing
    if layout == ALONE:
        exporting.export(directory / EXPORTED, job, engine.models, made)
    groups.destroy_model_parallel_groups()
    first, second, third = worst.tolist()
    return first, second, third


def recipe(directory: Path, parallel: dict[str, Any], *, packed: bool, recomputed: bool = False) -> Recipe:
    """A job with the weights of a directory."""
    recompute = {"recompute": {"granularity": "full"}} if recomputed else {}
    return from_mapping(
        {
            "name": "seen",
            "task": "sft",
            "backend": world.backend(),
            "model": {"path": str(directory), "dtype": "fp32", **recompute},
            "parallel": parallel,
            "data": {
                "source": "jsonl",
                "path": ["none"],
                "sequence_length": 128,
                "tokenizer": "hf:none",
                "template": "chat",
                "packed": packed,
            },
            "train": {"steps": 1, "global_batch_size": 2, "micro_batch_size": 1},
            "optimizer": {"warmup_steps": 0, "use_distributed_optimizer": False},
        }
    )


def wanted(numbers: dict[str, torch.Tensor], what: str, packed: bool) -> torch.Tensor:
    """What transformers has of both sequences, of which a pack has the second in part."""
    first, second = (numbers[f"{name} {what}"] for name in NAMES)
    return torch.cat([first, second[: KEPT if packed else None]])


def batch(engine, numbers: dict[str, torch.Tensor], names: Sequence[str], *, packed: bool):
    """These sequences as one micro-batch: rows, or a pack of whole and part."""
    from bundle.engine.microbatch import from_packing, from_rows
    from bundle.packing.images import ImageInputs
    from bundle.packing.packing import Packing

    cp, architecture, device = engine.groups.cp, engine.recipe.architecture, engine.device
    whole = {name: len(numbers[f"{name} ids"]) - 1 for name in names}
    learned = whole | ({"second": KEPT} if "second" in names else {})
    lengths = list((learned if packed else whole).values())
    each = list(zip(names, lengths, strict=True))
    ids = torch.cat([numbers[f"{name} ids"][:length] for name, length in each])
    labels = torch.cat([numbers[f"{name} ids"][1 : length + 1] for name, length in each])
    mask = torch.cat([(torch.arange(length) < learned[name]).float() for name, length in each])
    pixels, grids, seconds = (
        torch.cat([numbers[f"{name} {of}"] for name in names]) for of in ("pixels", "grids", "seconds")
    )
    seen = pixels, grids.numpy(), ids.numpy(), np.asarray(lengths), architecture.vision, seconds.numpy()
    images = ImageInputs.from_sequences(*seen)
    options: dict[str, Any] = {"mtp_layers": 0, "images": images.to(device)}
    ids, labels, mask = (x.to(device) for x in (ids, labels, mask))
    if packed:
        packing = Packing.from_lengths(lengths, engine.recipe.alignment, rank=cp.rank, device=device)
        return from_packing(ids, labels, mask, packing, **options)
    rows = (x.view(len(names), -1) for x in (ids, labels, mask))
    return from_rows(*rows, cp=cp.size, rank=cp.rank, **options)


def gradients(engine, theirs: dict[str, torch.Tensor]) -> torch.Tensor:
    """How far this rank's gradients are from theirs, of the tower too."""
    from bundle.models import naming

    found = []
    for model in engine.models:
        for named in naming.find_parameters(model, engine.groups):
            wanted = of_theirs(named.name, theirs, engine.recipe.architecture)
            whole = torch.zeros(named.compute_full_shape())
            whole[: len(wanted)] = wanted
            part = named.shard.extract(whole) if named.shard else whole
            far = (named.parameter.main_grad.cpu() - part).abs().max()
            found.append(far / wanted.abs().max().clamp(min=1e-20))
    return torch.stack(found).max()


def of_theirs(name: str, theirs: dict[str, torch.Tensor], architecture) -> torch.Tensor:
    """Their tensor for one of ours."""
    where = {"qwen2_5_vl": ("", "model."), "qwen3_vl": ("model.", "model.language_model.")}
    around, decoder = where[architecture.model_type.removesuffix("_moe")]
    if name.startswith("vision.tower."):
        return theirs[f"{around}visual.{name.removeprefix('vision.tower.')}"]
    of_text = {each.replace(decoder, "model.", 1): value for each, value in theirs.items()}
    return weights.ours(name, of_text, architecture)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
