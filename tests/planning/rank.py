"""One rank of a real world that measures what a step's forward passes leave for the backward passes.

python -m tests.planning.rank CASE...   (a JSON list each: name of a recipe, overrides ...); see tests.world.
"""

import json
import sys
from typing import Any

import torch

from bundle.recipe import Recipe, load
from tests.planning.megatron import plan_needed_patches
from tests.ranks import finish_rank, start_rank


def main(cases: list[list[str]]) -> None:
    runtime, rank = start_rank(plan_needed_patches())
    finish_rank([measure(load(name, overrides), runtime, rank) for name, *overrides in cases])


def measure(recipe: Recipe, runtime: Any, rank: int) -> dict[str, int]:
    """Bytes kept by all forward passes of one step, and the most micro-batches that waited at once."""
    from megatron.core.pipeline_parallel import schedules

    from bundle.engine import Engine
    from bundle.mcore import groups

    with runtime.megatron_calls():
        state = groups.create_model_parallel_groups(recipe.parallel, seed=recipe.seed, timeout_seconds=60)
    engine = Engine(recipe, runtime, state, torch.device("cpu"))
    kept = Kept(engine.models)
    waiting, sent = Waiting(schedules), Sent(schedules)
    with kept, waiting, sent:
        engine.forward_backward(micro_batches(recipe, state))
    groups.destroy_model_parallel_groups()
    return {"kept": kept.bytes + sent.bytes, "in_flight": waiting.most, "microbatches": waiting.forwards}


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Adds up the storages that autograd saves, each once, without parameters and buffers."""

    def __init__(self, models: list[torch.nn.Module]) -> None:
        own = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
        self.own = {tensor.untyped_storage().data_ptr() for tensor in own}
        self.storages: dict[int, torch.UntypedStorage] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        recomputing = torch._C._current_graph_task_id() != -1  # inside a backward pass
        if storage.data_ptr() not in self.own and not recomputing:
            # Kept alive, so that no later storage gets the same address.
            self.storages.setdefault(storage.data_ptr(), storage)
        return tensor

    @property
    def bytes(self) -> int:
        """What is left: a storage that was discarded for recomputation has no bytes any more."""
        return sum(storage.nbytes() for storage in self.storages.values())


class Waiting:
    """Counts the forward passes that have not met their backward pass, in megatron's schedules."""

    def __init__(self, schedules: Any) -> None:
        self.schedules, self.now, self.most, self.forwards = schedules, 0, 0, 0
        self.originals = {name: getattr(schedules, name) for name in ("forward_step", "backward_step")}

    def __enter__(self) -> None:
        for name, change in (("forward_step", 1), ("backward_step", -1)):
            setattr(self.schedules, name, self._counted(self.originals[name], change))

    def __exit__(self, *error: object) -> None:
        for name, original in self.originals.items():
            setattr(self.schedules, name, original)

    def _counted(self, original: Any, change: int) -> Any:
        def step(*args: Any, **keywords: Any) -> Any:
            self.now += change
            self.most = max(self.most, self.now)
            self.forwards += change > 0
            return original(*args, **keywords)

        return step


class Sent:
    """Adds up what stages send on, of which megatron's schedules hold what they do not free."""

    def __init__(self, schedules: Any) -> None:
        self.schedules, self.bytes = schedules, 0
        self.original = schedules.deallocate_output_tensor

    def __enter__(self) -> None:
        self.schedules.deallocate_output_tensor = self._counted

    def __exit__(self, *error: object) -> None:
        self.schedules.deallocate_output_tensor = self.original

    def _counted(self, out: Any, free: bool = False) -> None:
        self.original(out, free)
        if isinstance(out, torch.Tensor):
            self.bytes += out.nbytes


def micro_batches(recipe: Recipe, state: Any) -> list[Any]:
    """One step of random tokens for this rank."""
    from bundle.engine.microbatch import from_packing, from_rows
    from bundle.packing.packing import Packing
    from bundle.recipe.alignment import Alignment

    length, rows = recipe.data.sequence_length, recipe.train.micro_batch_size
    count = recipe.train.global_batch_size // (rows * state.dp.size)
    depths = recipe.architecture.mtp_layers
    made = []
    for _ in range(count):
        ids = torch.randint(0, 250, (rows, length))
        mask = torch.ones(rows, length)
        if recipe.data.packed:
            lengths, whole = [length // 2, length - length // 2], Alignment("thd", cp=state.cp.size)
            packing = Packing.from_lengths(
                lengths, whole, rank=state.cp.rank, length=length, device=ids.device
            )
            made.append(from_packing(ids[0], ids[0], mask[0], packing, mtp_layers=depths))
        else:
            cut = {"cp": state.cp.size, "rank": state.cp.rank, "mtp_layers": depths}
            made.append(from_rows(ids, ids, mask, **cut))
    return made


if __name__ == "__main__":
    main([json.loads(case) for case in sys.argv[1:]])
