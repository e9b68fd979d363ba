"""Ranks that train stretches of a run, each at a layout of its own, with checkpoints between them."""

import hashlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import world
from tests.checkpoints.world import make_engine, take_part, train_step
from tests.matrix.cases import ROWS, Case


@dataclass
class Stretch:
    """Steps at one layout, from the newest checkpoint in `load`; each `every` steps one goes into `save`."""

    parallel: dict[str, Any]
    steps: int
    load: str | None = None
    save: str | None = None
    every: int = 2
    background: bool = False
    weights_only: bool = False
    dropout: float = 0.0
    arithmetic: dict[str, Any] = field(default_factory=lambda: {"dtype": "fp32"})
    mtp: bool = True
    optimizer: dict[str, Any] = field(default_factory=dict)

    def case(self) -> Case:
        return Case(
            "stretch",
            self.parallel,
            mtp=self.mtp,
            dropout=self.dropout,
            arithmetic=self.arithmetic,
            optimizer=self.optimizer,
        )


def run(runtime: Any, folder: Path, plan: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns for each stretch its `losses`, bit for bit, what was loaded, and the random states it had."""
    return world.each(plan.items(), lambda stretch: train(Stretch(**stretch), runtime, folder))


def train(stretch: Stretch, runtime: Any, folder: Path) -> dict[str, Any]:
    from bundle.checkpoints.checkpoints import Checkpoints
    from bundle.checkpoints.directory import CheckpointDirectory
    from bundle.checkpoints.state import TrainState

    engine = make_engine(stretch.case(), runtime)
    found: dict[str, Any] = {"losses": []}
    step = 0
    if stretch.load and stretch.weights_only:
        kept = CheckpointDirectory(folder / stretch.load)
        step = kept.list_steps_newest_first()[0]  # for the sake of the rows that are trained on
        Checkpoints(kept, engine, keep=2).load_weights(kept.get_path(step))
    elif stretch.load:
        loaded = Checkpoints(CheckpointDirectory(folder / stretch.load), engine, keep=2).load_newest()
        assert loaded
        step = loaded.state.step
        found |= {"step": step, "notes": loaded.notes, "metrics": loaded.state.metrics}
    found["random"] = random_states()
    kept = CheckpointDirectory(folder / (stretch.save or "none"))
    checkpoints = Checkpoints(kept, engine, keep=2, background=stretch.background)
    for _ in range(stretch.steps):
        found["losses"].append(train_step(engine, step))
        step += 1
        checkpoints.poll()
        if stretch.save and step % stretch.every == 0:
            checkpoints.save(TrainState(step, step * ROWS, "digest", {"sum": 0.1 + 0.2}))
    checkpoints.poll(wait=True)
    return found


def random_states() -> list[str]:
    """Those of megatron's dropout, of every rank, as digests."""
    import torch.distributed as dist

    from bundle.mcore import groups

    state = groups.get_rng_tracker_states()["model-parallel-rng"].numpy().tobytes()
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, hashlib.sha256(state).hexdigest())
    return seen


if __name__ == "__main__":
    import json

    cases = [Stretch(**stretch).case() for stretch in json.loads(sys.argv[2]).values()]
    take_part(cases, run)
