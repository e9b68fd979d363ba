"""Which parameters are not the published ones after loading, or not after exporting, in a layout.

python -m tests.models.loading DIRECTORY LAYOUT prints how many were compared, and the names of those; in
DIRECTORY there is one for every config of the references, which write megatron's layout out by hand.
"""

import json
import sys
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import load_file

from bundle import backends, pretrained
from bundle.architectures.tensors import Tensors
from bundle.patches import applying
from bundle.verification import decide, everything
from tests import world
from tests.engine.oracle import LAYOUTS, SEED, recipe
from tests.reference import experts, weights
from tests.reference.configs import CONFIGS


def main(directory: Path, layout: str) -> None:
    torch.set_num_threads(1)
    applying.apply(everything(decide("cpu")))
    runtime = backends.prepare("cpu")
    world.join()
    parallel, form = LAYOUTS[layout]
    of_families = {config["model_type"]: name for name, config in reversed(CONFIGS.items())}.values()
    names = [
        name
        for name in (of_families if parallel else CONFIGS)  # over several ranks one of each family
        if "ep" not in parallel or experts.number(CONFIGS[name])
    ]
    with runtime.megatron():
        cases = ((name, name) for name in names)
        found = world.each(
            cases, lambda name: compared(name, directory / name, parallel, runtime, packed=form == "thd")
        )
    wrong = [f"{name} {tensor}" for name, (_, tensors) in found.items() for tensor in tensors]
    print(json.dumps({"compared": sum(count for count, _ in found.values()), "wrong": wrong}))


def compared(name: str, directory: Path, parallel: dict, runtime, *, packed: bool) -> tuple[int, list[str]]:
    from bundle.mcore import groups
    from bundle.mcore.gpt import transformer_config
    from bundle.models import exporting, gpt, naming

    job = recipe(CONFIGS[name], parallel, packed=packed)
    job = job.model_copy(update={"model": job.model.model_copy(update={"path": str(directory)})})
    wanted = weights.megatron_layout(CONFIGS[name], weights.drawn(CONFIGS[name], SEED))
    made = groups.initialize(job.parallel, seed=1, timeout_seconds=60)
    config = transformer_config(job, runtime.options(job))
    chunks = gpt.build(job, config, runtime, made, pretrained.of_recipe(job))
    found = [
        named for chunk in chunks for named in (*naming.parameters(chunk, made), *naming.buffers(chunk, made))
    ]
    out = directory.parents[1] / "exported" / f"{name} {len(parallel)}"
    exporting.export(out, job, chunks, made)
    exported = differences(directory, out, Tensors(job.architecture).copies())
    groups.destroy()
    wrong = [n.name for n in found if not torch.equal(n.parameter, part(n, wanted[n.name]))]
    return len(found), wrong + exported


def differences(directory: Path, out: Path, copies: Collection[str]) -> list[str]:
    """The published tensors that an export has not, or not bit for bit; copies are written once."""
    theirs, ours = (
        {key: value for file in path.glob("*.safetensors") for key, value in load_file(file).items()}
        for path in (directory, out)
    )
    wanted = {key: value for key, value in theirs.items() if key not in copies}
    same = {key for key in wanted if key in ours and torch.equal(ours[key], wanted[key])}
    return [f"exported {key}" for key in wanted.keys() ^ ours.keys() | wanted.keys() - same]


def part(named, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor, behind which a padded vocabulary has rows of zeros."""
    whole = whole.detach().float()
    behind = named.whole_shape()[0] - len(whole)
    whole = torch.cat((whole, whole.new_zeros(behind, *whole.shape[1:]))) if behind else whole
    return named.shard.of(whole) if named.shard else whole


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
