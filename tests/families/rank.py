"""How far our models are from transformers' numbers.

python -m tests.families.rank DIRECTORY (what `reference.write` left, by case) prints an object: case -> the
largest distance of a log-probability, an entropy or the loss [nats], that of a gradient, relative to the
largest number of its tensor, and that of a gradient of decays, of which only gated delta nets have any.
"""

import sys
from pathlib import Path

import torch

from tests import world
from tests.families import reference, weights
from tests.families.cases import Case, of_release
from tests.ranks import finish_rank, start_rank

DECAYS = ("A_log", "dt_bias")


def main(directory: Path) -> None:
    runtime, _ = start_rank()
    with runtime.megatron_calls():
        import megatron.core

        there = of_release(megatron.core.__version__)
        cases = ((case.name, case) for case in there if (directory / case.name).is_dir())
        found = world.each(cases, lambda case: distance(case, directory / case.name, runtime))
    finish_rank(found)


def distance(case: Case, directory: Path, runtime) -> tuple[float, float, float]:
    from bundle.engine import Engine
    from bundle.engine.microbatch import from_rows
    from bundle.mcore import groups
    from bundle.recipe import from_mapping

    theirs, wanted = reference.read(directory)
    job = from_mapping(
        {
            "name": "families",
            "backend": "cpu",
            "model": {
                "config": case.config | {"model_type": case.family},
                "dtype": "fp32",
                "mtp": {"layers": 0},
            },
            "data": {"source": "text", "path": ["none"], "sequence_length": 64, "tokenizer": "hf:none"},
            "train": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1},
            "optimizer": {"warmup_steps": 0},
        }
    )
    made = groups.create_model_parallel_groups(job.parallel, seed=1, timeout_seconds=60)
    engine = Engine(job, runtime, made, torch.device("cpu"))
    fill(engine, theirs)
    ids, labels = wanted["tokens"][None, :-1], wanted["tokens"][None, 1:]
    batch = [from_rows(ids, labels, torch.ones(labels.shape), cp=1, rank=0, mtp_layers=0)]
    scores = engine.compute_log_probs(batch)[0]
    engine.forward_backward(batch)
    seen = {
        "log-probs": scores.log_probs[0],
        "entropy": scores.entropy[0],
        "loss": torch.tensor([engine.take_losses().main]),
    }
    gradients = of_gradients(engine, reference.tensors(directory / reference.GRADIENTS))
    groups.destroy_model_parallel_groups()
    return max(float((seen[name] - wanted[name]).abs().max()) for name in seen), *gradients


def of_gradients(engine, theirs: dict[str, torch.Tensor]) -> tuple[float, float]:
    """How far our gradients are from theirs, and those of decays; the padded vocabulary's are to be zero."""
    from bundle.models import naming

    (model,) = engine.models
    found, decays = [torch.zeros(())], [torch.zeros(())]
    for named in naming.find_parameters(model, engine.groups):
        wanted = weights.ours(named.name, theirs, engine.recipe.architecture)
        seen = named.parameter.main_grad
        padding = seen[len(wanted) :].abs().sum()
        largest = wanted.abs().max().clamp(min=1e-20)  # no token has met every expert
        far = (seen[: len(wanted)] - wanted).abs().max() / largest + padding
        (decays if named.name.endswith(DECAYS) else found).append(far)
    return float(torch.stack(found).max()), float(torch.stack(decays).max())  # not a number where one is


def fill(engine, theirs: dict[str, torch.Tensor]) -> None:
    """Puts their weights where ours are, and large numbers into the padding of the vocabulary."""
    from bundle.models import naming

    architecture = engine.recipe.architecture
    (model,) = engine.models
    with torch.no_grad():
        for named in naming.find_parameters(model, engine.groups):
            value = weights.ours(named.name, theirs, architecture)
            if named.name.startswith(("embedding.", "output_layer.")):
                named.parameter.copy_(torch.randn(named.parameter.shape) * 9)
                named.parameter[: len(value)] = value
            else:
                named.parameter.copy_(value)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(weights.ours(name, theirs, architecture))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
