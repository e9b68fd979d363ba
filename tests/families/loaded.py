"""How far models whose weights are loaded as `train` loads them are from transformers' numbers.

python -m tests.families.loaded DIRECTORY (what `reference.write` left, by case) prints an object: case -> the
largest distance of a log-probability from transformers', relative to the largest of them.
"""

import json
import sys
from pathlib import Path

import torch

from bundle import backends, pretrained
from bundle.patches import applying
from bundle.verification.verifying import decide, everything
from tests import world
from tests.families import reference
from tests.families.cases import CASES, LENGTH, Case


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    applying.apply(everything(decide("cpu")))
    runtime = backends.prepare("cpu")
    world.join()
    with runtime.megatron():
        cases = ((case.name, case) for case in CASES)
        found = world.each(cases, lambda case: distance(case, directory / case.name, runtime))
    print(json.dumps(found))


def distance(case: Case, directory: Path, runtime) -> float:
    from bundle.engine import Engine
    from bundle.engine.microbatch import from_rows
    from bundle.mcore import groups
    from bundle.recipe import from_mapping

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
            "data": {"source": "text", "path": ["none"], "sequence_length": 64, "tokenizer": "hf:none"},
            "train": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1},
            "optimizer": {"warmup_steps": 0},
        }
    )
    made = groups.initialize(job.parallel, seed=1, timeout_seconds=60)
    engine = Engine(job, runtime, made, torch.device("cpu"), pretrained.of_recipe(job))
    _, numbers = reference.read(directory)
    ids, labels = numbers["tokens"][None, :-1], numbers["tokens"][None, 1:]
    batch = from_rows(ids, labels, torch.ones(1, LENGTH), cp=1, rank=0, mtp_layers=0)
    seen, wanted = engine.log_probs([batch])[0].log_probs[0], numbers["log-probs"]
    groups.destroy()
    return float((seen - wanted).abs().max() / wanted.abs().max())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
