"""Which published biases of routers are others in a model in bf16: loaded, trained a step, and exported.

python -m tests.models.rounding DIRECTORY NAME OUT prints how many there are, and the names of those.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from bundle import pretrained
from tests.engine import oracle
from tests.engine.experiments import micro_batches
from tests.engine.oracle import recipe
from tests.ranks import finish_rank, start_rank
from tests.reference.configs import CONFIGS


def main(directory: Path, name: str, out: Path) -> None:
    runtime, _ = start_rank()
    with runtime.megatron_calls():
        from bundle.engine import Engine
        from bundle.mcore import groups
        from bundle.models import exporting

        job = recipe(CONFIGS[name], {}, packed=False)
        still = job.model.moe.model_copy(update={"bias_update_rate": 0.0})
        changes = {"path": str(directory), "dtype": "bf16", "moe": still}
        job = job.model_copy(update={"model": job.model.model_copy(update=changes)})
        made = groups.create_model_parallel_groups(job.parallel, seed=1, timeout_seconds=60)
        engine = Engine(job, runtime, made, torch.device("cpu"), pretrained.find_recipe_weights(job))
        engine.forward_backward(micro_batches(engine, oracle.sequences_of(name), "bshd", "token"))
        engine.step_optimizer()
        exporting.export(out, job, engine.models, made)
    seen, wanted = (
        {
            key: value
            for file in sorted(of.glob("*.safetensors"))
            for key, value in load_file(file).items()
            if key.endswith("e_score_correction_bias")
        }
        for of in (out, directory)
    )
    wrong = [key for key in wanted if not torch.equal(seen[key].float(), wanted[key])]
    finish_rank({"compared": len(wanted), "wrong": wrong})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
