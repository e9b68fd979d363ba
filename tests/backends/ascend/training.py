"""One step of tiny models with ascend's core attention over the emulated operator, and with the cpu's.

python -m tests.backends.ascend.training prints [losses.., gradient norm] by case and attention as JSON.
"""

from itertools import product
from unittest.mock import patch

import torch

from bundle.packing.packing import Packing
from bundle.planning import build_plan
from bundle.recipe.alignment import Alignment
from tests.backends.ascend.contract import registered
from tests.backends.cpu.smoke import MODELS, VOCABULARY, recipe
from tests.ranks import finish_rank, start_rank

LENGTHS = (11, 1, 20)


def batch(packed: bool, depths: int):
    """Packed sequences, or two rows."""
    from bundle.engine.microbatch import from_packing, from_rows

    generator = torch.Generator().manual_seed(7)
    if packed:
        ids, labels = torch.randint(0, VOCABULARY, (2, sum(LENGTHS)), generator=generator)
        packing = Packing.from_lengths(LENGTHS, Alignment())
        return from_packing(ids, labels, torch.ones(len(ids)), packing, mtp_layers=depths)
    tokens = torch.randint(0, VOCABULARY, (2, 33), generator=generator)
    return from_rows(tokens[:, :-1], tokens[:, 1:], torch.ones(2, 32), cp=1, rank=0, mtp_layers=depths)


def step(model: str, packed: bool, runtime) -> list[float]:
    """[main loss, MTP losses.., gradient norm]."""
    from bundle.engine import Engine
    from bundle.mcore import groups

    job = recipe(model)
    with runtime.megatron_calls():
        state = groups.create_model_parallel_groups(job.parallel, seed=job.seed, timeout_seconds=60)
    engine = Engine(job, runtime, state, torch.device("cpu"))
    engine.forward_backward([batch(packed, job.architecture.mtp_layers)])
    norm, losses = engine.step_optimizer().grad_norm, engine.take_losses()
    with runtime.megatron_calls():
        groups.destroy_model_parallel_groups()
    return [losses.main, *losses.mtp, norm]


def main() -> None:
    runtime, _ = start_rank(build_plan(recipe("latent"), backend="cpu").patch_plan)
    from bundle.backends.ascend import attention as ascend
    from bundle.backends.cpu import attention as cpu
    from bundle.backends.cpu import runtime as specs

    registered()
    seen: dict[str, dict[str, list[float]]] = {}
    for name, attention in (("cpu", cpu.CpuCoreAttention), ("ascend", ascend.AscendCoreAttention)):
        with patch.object(specs, "CpuCoreAttention", attention):
            for model, packed in product(MODELS, (False, True)):
                case = f"{model} {'thd' if packed else 'bshd'}"
                seen.setdefault(case, {})[name] = step(model, packed, runtime)
    finish_rank(seen)


if __name__ == "__main__":
    main()
