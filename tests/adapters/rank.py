"""How far models with adapters are from transformers' numbers, in a layout, and what they export.

python -m tests.adapters.rank DIRECTORY LAYOUT...

In DIRECTORY is what `reference.write` left, by case; rank 0 prints an object: "LAYOUT: case" -> {what: the
largest distance, relative to the largest number}. One process leaves a checkpoint of its first step, and its
adapters after the second: others go on from it, and compare.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bundle import pretrained
from tests import world
from tests.adapters import reference
from tests.adapters.cases import CASES, LR_RATIO, OPTIMIZER, Case
from tests.families.cases import LENGTH
from tests.families.loaded import batch
from tests.ranks import finish_rank, start_rank

ALONE, LAID_OUT = "one process", "laid out"
LAYOUTS: dict[str, dict[str, Any]] = {
    ALONE: {},
    "recomputed": {},
    "tp2": {"tp": 2},
    "tp2 and sequence parallel": {"tp": 2, "sequence_parallel": True},
    "etp2": {"etp": 2},
    "pp2": {"pp": 2},
    LAID_OUT: {"pp": 2},  # all layers but one in the first
    "ep2": {"ep": 2},
    "packed cp2": {"cp": 2},
    "tp2 and ep2": {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True},
    "etp2 and ep2": {"etp": 2, "ep": 2},
}
CHECKPOINT, SECOND = "checkpoint", "second"


def main(directory: Path, layouts: list[str]) -> None:
    runtime, rank = start_rank()
    cases = [
        (f"{layout}: {name}", (case, layout)) for layout in layouts for name, case in cases_of(layout).items()
    ]
    with runtime.megatron_calls():
        found = world.each(cases, lambda each: distances(*each, directory / each[0].name, runtime))
    finish_rank(found, rank)


def cases_of(layout: str) -> dict[str, Case]:
    """Those that mean something there: experts with tp need sequence parallelism."""
    if layout == ALONE:
        return CASES
    dense, experts = ("dense", "some", "rsLoRA and DoRA"), ("experts", "latent", "experts with DoRA")
    of_experts = bool({"ep", "etp"} & LAYOUTS[layout].keys())
    names = experts if of_experts else dense if layout == "tp2" else dense + experts
    new = {"rsLoRA and DoRA", "experts with DoRA"} if layout == LAID_OUT else set()  # as in pp2
    return {name: CASES[name] for name in names if name not in new}


def recipe(case: Case, directory: Path, layout: str):
    from bundle.recipe import from_mapping

    parallel = dict(LAYOUTS[layout])
    if layout == LAID_OUT:
        layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
        parallel["pipeline_model_parallel_layout"] = f"E{'t' * (layers - 1)}|tL"
    return from_mapping(
        {
            "name": "adapters",
            "backend": "cpu",
            "model": {
                "path": str(directory),
                "config": {"model_type": case.of.family},
                "dtype": "fp32",
                "mtp": {"layers": 0},
                "lora": {
                    "path": str(directory / reference.ADAPTER),
                    "dropout": 0.0,
                    "loraplus_lr_ratio": LR_RATIO,
                },
                "recompute": {"granularity": "full"} if layout == "recomputed" else None,
            },
            "parallel": parallel,
            "data": {
                "source": "text",
                "path": ["none"],
                "sequence_length": 64,
                "tokenizer": "hf:none",
                "packed": layout.startswith("packed"),
            },
            "train": {"steps": 9, "global_batch_size": 4},
            # With a small eps the first steps are of signs, also of those of rounding errors.
            "optimizer": OPTIMIZER,
        }
    )


def distances(case: Case, layout: str, directory: Path, runtime) -> dict[str, float]:
    from bundle.engine import Engine
    from bundle.mcore import checkpoints, groups
    from bundle.models import adapters, exporting
    from tests.engine.experiments import gather_gradients

    job = recipe(case, directory, layout)
    made = groups.create_model_parallel_groups(job.parallel, seed=1, timeout_seconds=60)
    engine = Engine(job, runtime, made, torch.device("cpu"), pretrained.find_recipe_weights(job))
    matrices = list(adapters.list_matrices(engine.models))
    asked = {name for chunk in engine.models for name, p in chunk.named_parameters() if p.requires_grad}
    assert len(asked) == len(matrices)
    assert all(name.startswith("adapters.") for name in asked)

    out = directory / "out" / layout
    exporting.export_adapters(out / "peft", job, engine.models)
    exporting.export(out / "hf", job, engine.models, made)
    wanted = load_file(directory / reference.NUMBERS)
    of_rank = batch(engine, reference.tokens_of(directory)[0], (LENGTH,))
    found = {}
    scores = engine.compute_log_probs([of_rank])[0].log_probs.flatten()
    bare = engine.compute_reference_log_probs([of_rank])[0].flatten()
    found["reference"] = distance(bare, wanted.pop(reference.BARE))
    found["log-probs"] = distance(scores, wanted["log-probs"])
    assert torch.equal(engine.compute_log_probs([of_rank])[0].log_probs.flatten(), scores)
    engine.forward_backward([of_rank])
    gather_gradients(engine)
    of_whole = [wanted[name] for name in wanted if name != "log-probs"]
    largest = max(whole.abs().max() for whole in of_whole)
    gaps = [(named.parameter.main_grad - part(named, wanted[named.name])).abs().max() for named in matrices]
    found["gradients"] = float(max(gaps) / largest)
    norm = torch.stack([whole.square().sum() for whole in of_whole]).sum().sqrt()
    found["norm"] = distance(torch.tensor(engine.step_optimizer().grad_norm), norm)
    stepped = load_file(directory / reference.STEPPED)
    found["step"] = max(distance(named.parameter, part(named, stepped[named.name])) for named in matrices)

    kept = directory / CHECKPOINT
    if layout == ALONE:
        kept.mkdir()
        checkpoints.save(kept, engine.checkpoint_modules, engine.optimizer)
    else:
        with torch.no_grad():
            for named in matrices:
                named.parameter.fill_(float("nan"))
        checkpoints.load(
            kept, engine.checkpoint_modules, engine.optimizer, checkpoints.choose_sharding_type()
        )
    engine.forward_backward([of_rank])
    engine.step_optimizer()
    if layout == ALONE:
        exporting.export_adapters(directory / SECOND, job, engine.models)
    second = reference.adapter(directory / SECOND)
    found["resumed"] = max(distance(named.parameter, part(named, second[named.name])) for named in matrices)
    adapters.initialize_adapters(engine.models, seed=1)
    new = engine.compute_log_probs([of_rank])[0].log_probs.flatten()
    found["new"] = distance(new, bare)
    groups.destroy_model_parallel_groups()
    return found


def distance(seen: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((seen.detach() - wanted).abs().max() / wanted.abs().max())


def part(named, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole matrix."""
    return named.shard.extract(whole) if named.shard else whole


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
