"""A rank that trains a step on padded rows as a loader gives them, and on the same sequences one by one.

python -m tests.training.padded DIRECTORY prints how far the two are apart, and how many tokens were counted.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from bundle.data import Loader, prepare
from bundle.launch import job as job_file
from bundle.planning import build_plan
from bundle.recipe import load
from tests.ranks import finish_rank, start_rank

LENGTH = 128
ROWS = [{"prompt": f"{n}?", "response": f"{n * n} " + "ab" * (7 * n % 31)} for n in range(16)]
SMALL = (
    "task=sft",
    "data.source=jsonl",
    "data.separator=null",
    f"data.sequence_length={LENGTH}",
    "data.validation=0",
    "data.packed=false",
    "train.micro_batch_size=4",
    "train.global_batch_size=16",
    "parallel.ep=1",
    "model.mtp.layers=1",
    "model.config.num_hidden_layers=2",
    "model.moe.aux_loss_coeff=0.5",
    "model.config.seq_aux=true",  # else it is of micro-batches, as they are cut
    "model.moe.z_loss_coeff=0.01",
)


def main(directory: Path) -> None:
    path = directory / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    recipe = load("demo", (*SMALL, f"data.path={path}"))
    job = job_file.from_plan(build_plan(recipe, backend="cpu", per_node=1), directory / "run")
    assert job.patches is not None
    runtime, _ = start_rank(job.patches, recipe)
    with runtime.megatron_calls():
        from bundle.engine.microbatch import from_rows
        from bundle.mcore import groups
        from bundle.training.loop import Batches

        made = groups.create_model_parallel_groups(recipe.parallel, seed=recipe.seed, timeout_seconds=60)
        loader = Loader(recipe, prepare(recipe, directory / "tokens"), 0, 1)
        batches = Batches(recipe, loader, made, torch.device("cpu"))
        rows = batches.build_training_batches(0)
        alone, lengths = [], []
        for batch in loader.read_training_step(0):
            for ids, labels, mask in zip(batch.ids, batch.labels, batch.loss_mask, strict=True):
                length = int(mask.nonzero().max()) + 2  # the last label is a token as well
                lengths.append(length)
                of = (values[None, :length] for values in (ids, labels, mask))
                alone.append(from_rows(*of, cp=1, rank=0, mtp_layers=1))
        seen, wanted = (
            after(job.recipe_with_planned_attention, runtime, made, given) for given in (rows, alone)
        )
    found = {name: float((seen[name] - wanted[name]).abs().max()) for name in seen}
    told = batches.sizes.lengths.tolist() == lengths
    finish_rank(found | {"lengths": told, "tokens": sum(lengths)})


def after(recipe: Any, runtime: Any, made: Any, given: list[Any]) -> dict[str, torch.Tensor]:
    """The steering biases after a step, the gradients of the routers, and the mean losses."""
    from bundle.engine import Engine
    from bundle.mcore import routers

    engine = Engine(recipe, runtime, made, torch.device("cpu"))
    of = [router for model in engine.models for router in routers.find_routers(model)]
    engine.forward_backward(given)
    losses = engine.take_losses()
    return {
        "biases": torch.stack([router.expert_bias.clone() for router in of]),
        "gradients": torch.stack([router.weight.main_grad.clone() for router in of]),
        "loss": torch.tensor([losses.main, *losses.mtp]),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
