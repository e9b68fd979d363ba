"""How far models that see images, with adapters, are from PEFT's numbers, in a layout.

python -m tests.vision.adapting DIRECTORY LAYOUT (by `write`) prints an object on rank 0: case -> {what: the
largest distance, relative to the largest number}. One process also exports the adapter, and the model merged.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from bundle import pretrained
from bundle.recipe import from_mapping
from tests import world
from tests.ranks import finish_rank, start_rank
from tests.vision import reference
from tests.vision.cases import CASES, Case
from tests.vision.rank import LAYOUTS as EVERY
from tests.vision.rank import NAMES, batch, recipe, wanted
from tests.vision.reference import KEPT

RANK, ALPHA = 3, 5.0
# Of the decoder, of the tower's blocks and of its mergers; each family's own.
_DEEP = ("q_proj", "o_proj", "attn.qkv", "attn.proj", "linear_fc1", "linear_fc2")
TARGETS = {
    "qwen2_5_vl": ("q_proj", "o_proj", "down_proj", "attn.qkv", "attn.proj", "mlp.0", "mlp.2"),
    "qwen3_vl": _DEEP,
    "qwen3_vl_moe": _DEEP,
}
ADAPTER, NUMBERS = "adapter", "wanted.safetensors"
ALONE, MERGED = "one process", "merged"
LAYOUTS = {name: EVERY[name] for name in (ALONE, "recomputed pp2", "tp2 and sequence parallel", "packed cp2")}
HUB = [case for case in CASES if case.name.endswith("on the Hub")]


def write(case: Case, begun: Path, directory: Path) -> None:
    """An adapter of random A and B, by PEFT, for what `reference.write` left in `begun`, and its numbers."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(7)
    made: Any = get_peft_model(
        opened(begun), LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS[case.family]))
    )
    matrices = {name: of for name, of in made.named_parameters() if of.requires_grad}
    with torch.no_grad():
        for of in matrices.values():
            of.copy_(torch.randn(of.shape) * 0.2)
    made.save_pretrained(directory / ADAPTER)
    _, numbers = reference.read(begun)
    log_probs = {name: of_sequence(made, numbers, name) for name in NAMES}
    learned = [log_probs[name][: KEPT if name == "second" else None] for name in NAMES]
    (-torch.cat(learned).mean()).backward()
    found = {f"{name} log-probs": of.detach() for name, of in log_probs.items()}
    found |= {name.replace(".default.", "."): of.grad.contiguous() for name, of in matrices.items()}
    save_file(found, directory / NUMBERS)


def opened(directory: Path) -> Any:
    """A model by transformers."""
    from transformers import AutoModelForImageTextToText

    kind: Any = AutoModelForImageTextToText
    return kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def of_sequence(model: Any, numbers: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The log-probabilities of a sequence's tokens."""
    ids, seen = numbers[f"{name} ids"], model(**reference.inputs(numbers, name))
    return seen.logits[0].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)


def main(directory: Path, layout: str) -> None:
    runtime, rank = start_rank()
    with runtime.megatron_calls():
        cases = ((case.name, case) for case in HUB)
        found = world.each(cases, lambda case: distances(directory / case.name, layout, runtime))
    finish_rank(found, rank)


def distances(directory: Path, layout: str, runtime: Any) -> dict[str, float]:
    from bundle.engine import Engine
    from bundle.mcore import groups
    from bundle.models import adapters, exporting

    packed, apart = layout.startswith("packed"), layout.startswith("recomputed")
    values = recipe(directory / "model", LAYOUTS[layout], packed=packed, recomputed=apart).dump()
    values["model"]["lora"] = {"path": str(directory / ADAPTER)}
    job = from_mapping(values)
    made = groups.create_model_parallel_groups(job.parallel, seed=1, timeout_seconds=60)
    engine = Engine(job, runtime, made, torch.device("cpu"), pretrained.find_recipe_weights(job))
    matrices = list(adapters.list_matrices(engine.models))
    asked = [of for model in engine.models for of in model.parameters() if of.requires_grad]
    assert {id(of) for of in asked} == {id(of.parameter) for of in matrices}
    _, numbers = reference.read(directory / "model")
    theirs = load_file(directory / NUMBERS)
    sequences = [(name,) for name in NAMES] if apart else [NAMES]
    given = [batch(engine, numbers, names, packed=packed) for names in sequences]
    seen = torch.cat([one.log_probs.flatten() for one in engine.compute_log_probs(given)])
    engine.forward_backward(given)
    log_probs = wanted(theirs, "log-probs", packed)
    gradients = {of: value for of, value in theirs.items() if of.endswith(".weight")}
    far = [torch.zeros(())]
    for named in matrices:
        (whole,) = (value for of, value in gradients.items() if of.endswith(tail(named.name)))
        part = named.shard.extract(whole) if named.shard else whole
        far.append((named.parameter.main_grad - part).abs().max() / whole.abs().max())
    worst = torch.stack([(seen - log_probs).abs().max() / log_probs.abs().max(), torch.stack(far).max()])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if layout == ALONE:
        exporting.export_adapters(directory / "out", job, engine.models)
        exporting.export(directory / MERGED, job, engine.models, made)
        assert len(matrices) == len(gradients)
    groups.destroy_model_parallel_groups()
    return dict(zip(("log-probs", "gradients"), worst.tolist(), strict=True))


def tail(name: str) -> str:
    """What a published name and that of transformers' module end with alike."""
    return f".{name.removeprefix('model.').removeprefix('language_model.')}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
