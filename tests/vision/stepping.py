"""How far a step is from plain torch's, where parts of what sees images are frozen or have their own rates.

python -m tests.vision.stepping DIRECTORY LAYOUT (by `reference.write`) prints an object on each rank: case ->
what is wrong, and the largest distance of a step's change in a weight, relative to the largest there.
"""

import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version

from bundle import pretrained
from bundle.architectures.tensors import TOWER_PREFIX
from bundle.capabilities.cpu import LOCAL_LAYER_TRAITS
from bundle.environment.packages import MegatronCode
from bundle.planning.layout import build_rank_layout
from bundle.planning.memory import StateBuffers
from bundle.recipe import from_mapping
from tests import world
from tests.ranks import finish_rank, start_rank
from tests.vision import reference
from tests.vision.cases import CASES, Case
from tests.vision.rank import NAMES, batch, of_theirs, recipe

LR, DECAY, EPS, CLIP, WARMUP = 0.02, 0.3, 0.05, 1.5, 2
TOWER_LR, PROJECTOR_LR = 0.001, 0.5  # the first is below the rate of the first step of the warm-up
TRAINED: dict[str, dict[str, Any]] = {
    "rates": {"tower_lr": TOWER_LR, "projector_lr": PROJECTOR_LR},
    "tower frozen": {"freeze_tower": True, "projector_lr": PROJECTOR_LR},
    "projector frozen": {"freeze_projector": True},
    "both frozen": {"freeze_tower": True, "freeze_projector": True},
}
ROUNDED = 2e-7  # of a weight, whose change is seen by their difference
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "tp2 and sequence parallel": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "dp2": {},
}


def main(directory: Path, layout: str) -> None:
    runtime, _ = start_rank()
    hub = {case.family: case for case in CASES if case.name.endswith("on the Hub")}
    chosen = [(hub["qwen3_vl"], how) for how in TRAINED] + [(hub["qwen2_5_vl"], "tower frozen")]
    every = ((f"{case.name}, {how}", (case, how)) for case, how in chosen)
    with runtime.megatron_calls():
        found = world.each(every, lambda of: step(of[0], directory / of[0].name, layout, of[1], runtime))
    finish_rank(found)


def step(case: Case, directory: Path, layout: str, how: str, runtime: Any) -> tuple[list[str], float]:
    from bundle.engine import Engine
    from bundle.mcore import groups
    from bundle.models import naming

    values = recipe(directory, LAYOUTS[layout], packed=False).dump()
    values["model"]["vision"] = TRAINED[how]
    values["train"] |= {"steps": 4, "global_batch_size": 4 if layout == "dp2" else 2}
    values["optimizer"] |= {
        "lr": LR, "weight_decay": DECAY, "eps": EPS, "clip_grad": CLIP, "warmup_steps": WARMUP,
        "schedule": "linear", "use_distributed_optimizer": layout != "pp2",
    }  # fmt: skip
    job = from_mapping(values)
    made = groups.create_model_parallel_groups(job.parallel, seed=1, timeout_seconds=60)
    begun = pretrained.find_recipe_weights(job)
    engine = Engine(job, runtime, made, torch.device("cpu"), begun)
    _, numbers = reference.read(directory)
    given = [batch(engine, numbers, NAMES, packed=False)]
    engine.forward_backward(given)
    wrong = misplaced(engine, how)
    result = engine.step_optimizer()
    wrong += unplanned(engine, job)
    theirs = reference.tensors(directory)
    gradients = reference.tensors(directory / reference.GRADIENTS)
    learned = {name: of for name, of in gradients.items() if rate(name, how) is not None}
    norm = torch.stack([of.double().square().sum() for of in learned.values()]).sum().sqrt()
    if not math.isclose(result.grad_norm, float(norm), rel_tol=1e-4):
        wrong.append(f"norm {result.grad_norm}, not {float(norm)}")
    share, far = min(1.0, CLIP / (float(norm) + 1e-6)), []
    own = [named for model in engine.models for named in naming.find_parameters(model, made)]
    for named in own:
        before, gradient = (of_theirs(named.name, of, job.architecture) for of in (theirs, gradients))
        lr = rate(f"visual.{named.name}" if named.name.startswith(TOWER_PREFIX) else named.name, how)
        change = torch.zeros_like(before)
        if lr is not None:  # the first step of Adam, in the first of the warm-up's two parts
            gradient = gradient * share
            decay = DECAY * before if before.ndim > 1 else 0
            change = -lr / WARMUP * (gradient / (gradient.abs() + EPS) + decay)
        whole, first = (torch.zeros(named.compute_full_shape()) for _ in range(2))
        whole[: len(change)], first[: len(change)] = change, before
        part, start = (named.shard.extract(of) if named.shard else of for of in (whole, first))
        error = (named.parameter.detach() - start - part).abs() - ROUNDED * start.abs() * (lr is not None)
        far.append(float(error.max() / change.abs().max().clamp(min=1e-5)))
    if how == "rates":
        wrong += continued(engine, job, runtime, made, given, directory / f"between, {layout}")
    groups.destroy_model_parallel_groups()
    return wrong, max(far)


def rate(name: str, how: str) -> float | None:
    """The highest learning rate of one of transformers' tensors; None: it is frozen."""
    if "visual." not in name:
        return LR
    part = "projector" if "merger" in name else "tower"
    return None if f"freeze_{part}" in TRAINED[how] else TRAINED[how].get(f"{part}_lr", LR)


def misplaced(engine: Any, how: str) -> list[str]:
    """What has a gradient and is frozen, or has none and is not."""
    wrong = []
    for name, parameter in (pair for model in engine.models for pair in model.named_parameters()):
        frozen = rate(f"visual.{name}" if name.startswith(TOWER_PREFIX) else name, how) is None
        if frozen != (getattr(parameter, "main_grad", None) is None) or parameter.grad is not None:
            wrong.append(f"{name}: {'has a gradient' if frozen else 'has none'}")
    return wrong


def unplanned(engine: Any, job: Any) -> list[str]:
    """What there is of weights, gradients and optimizer state, if it is not as the plan has it."""
    import megatron.core

    code = MegatronCode(Version(megatron.core.__version__), Path(megatron.core.__file__).parents[2])
    states = StateBuffers.from_recipe(
        job, build_rank_layout(job, dist.get_world_size()), LOCAL_LAYER_TRAITS, code
    )
    predicted = states.compute_rank_bytes(dist.get_rank())
    buffers = [of for chunk in engine.chunks for of in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    kept = [
        tensor.nbytes
        for part in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
        for state in part.optimizer.state.values()
        for kind, tensor in state.items()
        if kind != "step"
    ]
    seen = {
        "parameters": sum(of.nbytes for model in engine.models for of in model.parameters()),
        "gradients": sum(of.grad_data.nbytes for of in buffers),
        "moments": sum(kept),
    }
    return [
        f"{of} bytes of {what}, planned are {getattr(predicted, what)}"
        for what, of in seen.items()
        if not 0.97 * of <= getattr(predicted, what) <= 1.03 * of  # buffers are padded
    ]


def continued(engine: Any, job: Any, runtime: Any, made: Any, given: Any, directory: Path) -> list[str]:
    """What differs after a second step when a checkpoint lies between them."""
    from bundle.engine import Engine
    from bundle.mcore import checkpoints

    directory.mkdir(exist_ok=True)
    dist.barrier()
    checkpoints.save(directory, engine.models, engine.optimizer)
    other = Engine(job, runtime, made, torch.device("cpu"))
    checkpoints.load(directory, other.models, other.optimizer, checkpoints.choose_sharding_type())
    other.scheduler.load_state_dict(engine.scheduler.state_dict())
    for each in (engine, other):
        each.forward_backward(given)
        each.step_optimizer()
    pairs = zip(engine.models[0].named_parameters(), other.models[0].parameters(), strict=True)
    return [f"{name}: another after a checkpoint" for (name, a), b in pairs if not torch.equal(a, b)]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
