"""Which parameters are not the published ones after loading, or not after exporting, in a layout; and how
far the losses of multi-token prediction are from a plain model's.

python -m tests.models.loading DIRECTORY LAYOUT OUT prints how many were compared, those names and distances;
in DIRECTORY there is one for every config of the references, which write megatron's layout out by hand, and
in OUT is put what is exported.
"""

import sys
from pathlib import Path

import torch
from packaging.version import Version
from safetensors.torch import load_file

from bundle import pretrained
from bundle.architectures.tensors import Tensors
from bundle.environment import packages
from bundle.environment.packages import MegatronCode
from bundle.planning.problems import find_missing_feature
from bundle.pretrained.writing import PublishedModel
from tests import world
from tests.engine import oracle
from tests.engine.experiments import micro_batches
from tests.engine.oracle import LAYOUTS, SEED, recipe
from tests.ranks import finish_rank, start_rank
from tests.reference import experts, weights
from tests.reference.configs import CONFIGS


def main(directory: Path, layout: str, out: Path) -> None:
    runtime, _ = start_rank()
    parallel, form = LAYOUTS[layout]
    of_families = {config["model_type"]: name for name, config in reversed(CONFIGS.items())}.values()
    names = [
        name
        for name in (of_families if parallel else CONFIGS)  # over several ranks one of each family
        if "ep" not in parallel or experts.number(CONFIGS[name])
    ]
    with runtime.megatron_calls():
        import megatron.core

        release = megatron.core.__version__
        code = MegatronCode(Version(release))
        packed = form == "thd" and not packages.is_base_version_within(
            release, "<0.16"
        )  # the trap mtp-packed
        cases = (
            (name, name) for name in names if not find_missing_feature(CONFIGS[name]["model_type"], code)
        )
        found = world.each(
            cases,
            lambda name: compared(name, directory / name, out / name, parallel, runtime, packed=packed),
        )
    wrong = [f"{name} {tensor}" for name, (_, tensors, _) in found.items() for tensor in tensors]
    predicted = {name: far for name, (*_, far) in found.items() if far is not None}
    compared_tensors = sum(count for count, *_ in found.values())
    finish_rank({"compared": compared_tensors, "wrong": wrong, "predicted": predicted})


def compared(
    name: str, directory: Path, out: Path, parallel: dict, runtime, *, packed: bool
) -> tuple[int, list[str], float | None]:
    from bundle.engine import Engine
    from bundle.mcore import groups
    from bundle.models import exporting, naming

    job = recipe(CONFIGS[name], parallel, packed=packed)
    job = job.model_copy(update={"model": job.model.model_copy(update={"path": str(directory)})})
    wanted = weights.megatron_layout(CONFIGS[name], weights.drawn(CONFIGS[name], SEED))
    made = groups.create_model_parallel_groups(job.parallel, seed=1, timeout_seconds=60)
    engine = Engine(job, runtime, made, torch.device("cpu"), pretrained.find_recipe_weights(job))
    chunks = engine.models
    found = [
        named
        for chunk in chunks
        for named in (*naming.find_parameters(chunk, made), *naming.find_expert_biases(chunk, made))
    ]
    exporting.export(out, job, chunks, made)
    wrong = [n.name for n in found if not torch.equal(n.parameter, part(n, wanted[n.name]))]
    exported = differences(directory, out)
    converted = through_torch_dist(directory, out.with_name(f"{out.name} converted"), job, chunks, found)
    predicted = of_predictions(engine, name, "thd" if packed else "bshd")
    groups.destroy_model_parallel_groups()
    return len(found), wrong + exported + converted, predicted


def of_predictions(engine, name: str, form: str) -> float | None:
    """How far the losses of multi-token prediction are from a plain model's with the same weights."""
    if not engine.recipe.architecture.mtp_layers:
        return None
    sequences = oracle.sequences_of(name)
    engine.forward_backward(micro_batches(engine, sequences, form, "token"))
    seen, wanted = engine.take_losses().mtp, oracle.predictions(name)
    return max(abs(float(a) - b) / b for a, b in zip(seen, wanted, strict=True))


def through_torch_dist(directory: Path, out: Path, job, chunks, found) -> list[str]:
    """What is lost from megatron's own checkpoint to Hugging Face, or from there to what megatron reads."""
    from bundle.mcore import checkpoints, gpt, torch_dist, unpickling
    from bundle.models import conversion

    def state():
        sharded = {}
        for number, chunk in enumerate(chunks):
            gpt.set_chunk_if_interleaved(number if len(chunks) > 1 else None)
            sharded[f"model{number}"] = chunk.sharded_state_dict(metadata=content)
        return sharded

    content = {"singleton_local_shards": False}
    saved, imported = (out.with_name(f"{out.name} {name}") for name in ("saved", "imported"))
    table, first = Tensors(job.architecture), torch.distributed.get_rank() == 0
    if first:
        saved.mkdir()
    torch.distributed.barrier()
    with checkpoints.use_result_file(saved):
        checkpoints.write(state(), saved)
    wrong = []
    if first:
        conversion.write_full_hugging_face_model(
            torch_dist.TorchDistCheckpoint(saved), PublishedModel.from_recipe(job), out, "fp32"
        )
        wrong = differences(directory, out)
        weights_of = pretrained.find_model_weights(directory, job.model.config, job.architecture)
        conversion.to_torch_dist(weights_of, table, imported)
    torch.distributed.barrier()
    before = [named.parameter.detach().clone() for named in found]
    with torch.no_grad():
        for named in found:
            named.parameter.fill_(torch.nan)
    with unpickling.restrict_to_data():
        loaded = checkpoints.read(state(), conversion.resolve_tracked_checkpoint(imported))
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{number}"])
    lost = [n.name for n, was in zip(found, before, strict=True) if not torch.equal(n.parameter, was)]
    return [*wrong, *(f"imported {name}" for name in lost)]


def differences(directory: Path, out: Path) -> list[str]:
    """The published tensors that an export has not, or not bit for bit."""
    theirs, ours = (
        {key: value for file in path.glob("*.safetensors") for key, value in load_file(file).items()}
        for path in (directory, out)
    )
    same = {key for key in theirs if key in ours and torch.equal(ours[key], theirs[key])}
    return [f"exported {key}" for key in theirs.keys() ^ ours.keys() | theirs.keys() - same]


def part(named, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor, behind which a padded vocabulary has rows of zeros."""
    whole = whole.detach().float()
    behind = named.compute_full_shape()[0] - len(whole)
    whole = torch.cat((whole, whole.new_zeros(behind, *whole.shape[1:]))) if behind else whole
    return named.shard.extract(whole) if named.shard else whole


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
