"""How far models whose weights are loaded as `train` loads them are from transformers' numbers, in a layout.

python -m tests.families.loaded DIRECTORY LAYOUT (by `reference.write`) prints an object on rank 0:
case -> the largest distance of a log-probability from transformers', relative to the largest of them. One
process also exports each model again, beside what it has loaded, as it is and in blocks of FP8.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from bundle import pretrained
from bundle.architectures.published_names import PUBLISHED_NAMES
from tests import world
from tests.families import reference
from tests.families.cases import LENGTH, Case, of_release
from tests.ranks import finish_rank, start_rank

ALONE, EXPORTED, IN_BLOCKS = "one process", "exported", "exported in FP8"
LAYOUTS: dict[str, dict[str, Any]] = {
    ALONE: {},
    "tp2 and sequence parallel": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "ep2": {"ep": 2},
    "packed cp2": {"cp": 2},
}
# Of one pack: a sequence's first tokens have the log-probabilities that they have in the whole of it.
LENGTHS = (LENGTH, 13)


def cases_of(layout: str, release: str) -> list[Case]:
    """All on one process; elsewhere one of each family, Qwen2's tied one among them.

    Packs are not for gated delta nets.
    """
    if layout == ALONE:
        return list(of_release(release))
    of_families = {case.family: case for case in of_release(release)}.values()
    if layout == "packed cp2":
        return [case for case in of_families if not case.linear]
    return [case for case in of_families if layout != "ep2" or "num_experts_per_tok" in case.config]


def main(directory: Path, layout: str) -> None:
    runtime, rank = start_rank()
    with runtime.megatron_calls():
        import megatron.core

        cases = ((case.name, case) for case in cases_of(layout, megatron.core.__version__))
        found = world.each(cases, lambda case: distance(case, directory / case.name, layout, runtime))
    finish_rank(found, rank)


def distance(case: Case, directory: Path, layout: str, runtime) -> float:
    from bundle.engine import Engine
    from bundle.mcore import groups
    from bundle.models import exporting
    from bundle.recipe import from_mapping

    packed = layout.startswith("packed")
    job = from_mapping(
        {
            "name": "loaded",
            "backend": "cpu",
            "model": {
                "path": str(directory),
                "config": {"model_type": case.family},
                "dtype": "fp32",
                "mtp": {"layers": 0},
            },
            "parallel": LAYOUTS[layout] | case.parallel,
            "data": {
                "source": "text",
                "path": ["none"],
                "sequence_length": 64,
                "tokenizer": "hf:none",
                "packed": packed,
            },
            "train": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1},
            "optimizer": {"warmup_steps": 0},
        }
    )
    made = groups.create_model_parallel_groups(job.parallel, seed=1, timeout_seconds=60)
    engine = Engine(job, runtime, made, torch.device("cpu"), pretrained.find_recipe_weights(job))
    _, numbers = reference.read(directory)
    lengths = LENGTHS if packed else (LENGTH,)
    seen = engine.compute_log_probs([batch(engine, numbers["tokens"], lengths)])[0].log_probs.flatten()
    wanted = torch.cat([numbers["log-probs"][:length] for length in lengths])
    if layout == ALONE:
        exporting.export(directory / EXPORTED, job, engine.models, made)
        if not (PUBLISHED_NAMES[case.family].stacked_experts or case.linear):  # elsewhere it is refused
            asked = from_mapping(job.dump() | {"checkpoint": {"export": "hf-fp8"}})
            exporting.export(directory / IN_BLOCKS, asked, engine.models, made)
    groups.destroy_model_parallel_groups()
    return float((seen - wanted).abs().max() / wanted.abs().max())


def batch(engine, tokens: torch.Tensor, lengths: tuple[int, ...]):
    from bundle.engine.microbatch import from_packing, from_rows
    from bundle.packing.packing import Packing

    ids = torch.cat([tokens[:length] for length in lengths])
    labels = torch.cat([tokens[1 : length + 1] for length in lengths])
    cp = engine.groups.cp
    if len(lengths) == 1:
        mask = torch.ones(1, LENGTH)
        return from_rows(ids[None], labels[None], mask, cp=cp.size, rank=cp.rank, mtp_layers=0)
    packing = Packing.from_lengths(lengths, engine.recipe.alignment, rank=cp.rank)
    return from_packing(ids, labels, torch.ones(len(ids)), packing, mtp_layers=0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
