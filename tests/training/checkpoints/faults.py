"""Ranks whose checkpoints meet every fault in turn; what became of each is written down."""

import pickle
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bundle.errors import BundleError
from tests.matrix.cases import ROWS, Case
from tests.training.checkpoints.world import make_engine, take_part, train_step

CASE = Case("faults", {"ep": 2})


class Payload:
    """What a hostile pickle holds: unpickling it makes the file `ran`."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def run(runtime: Any, folder: Path, _plan: Any) -> dict[str, Any]:
    from bundle.training.checkpoints.checkpoints import Checkpoints
    from bundle.training.checkpoints.shelf import Shelf
    from bundle.training.checkpoints.state import TrainState

    engine = make_engine(CASE, runtime)
    shelf = Shelf(folder / "ours")
    ours = Checkpoints(shelf, engine, keep=9)
    for step in (1, 2, 3):
        train_step(engine, step)
        ours.save(TrainState(step, step * ROWS, "digest"))
    newest, mark = shelf.place(3), folder / "ran"
    seen: dict[str, Any] = {}

    def outcome(action: Any) -> Any:
        try:
            loaded = action()
            return {"step": loaded.state.step, "notes": loaded.notes} if loaded else None
        except RuntimeError as error:  # what ranks raise that only know that rank 0 failed
            return str(error)
        except BundleError as error:
            return {"error": type(error).__name__, "text": str(error), "code": int(error.code)}

    def alone(action: Any) -> None:
        """Has rank 0 change files while the others wait."""
        if dist.get_rank() == 0:
            action()
        dist.barrier()

    elsewhere = folder / "elsewhere"
    alone(lambda: shutil.copytree(newest, elsewhere))
    seen["foreign"] = outcome(lambda: ours.load_from(elsewhere, trusted=False))
    seen["trusted"] = outcome(lambda: ours.load_from(elsewhere, trusted=True))
    alone(lambda: (elsewhere / "megatron" / "common.pt").write_bytes(pickle.dumps(Payload(mark))))
    seen["trusted but tampered"] = outcome(lambda: ours.load_from(elsewhere, trusted=True))

    weights = newest / "megatron" / "__1_0.distcp"
    alone(lambda: weights.write_bytes(weights.read_bytes()[:-100]))
    seen["truncated"] = outcome(ours.load_newest)
    second = shelf.place(2) / "megatron" / "common.pt"
    alone(lambda: second.write_bytes(pickle.dumps(Payload(mark))))
    seen["tampered"] = outcome(ours.load_newest)
    alone(lambda: (shelf.place(1) / "manifest.json").unlink())
    seen["all damaged"] = outcome(ours.load_newest)
    seen["ran"] = mark.exists()

    full = Shelf(folder / "full")
    small = Checkpoints(full, engine, keep=9)
    small.save(TrainState(1, ROWS, "digest"))
    with full_disk():
        seen["full disk"] = outcome(lambda: small.save(TrainState(2, 2 * ROWS, "digest")))
    dist.barrier()
    seen["left behind"] = sorted(path.name for path in full.root.iterdir())
    seen["after full disk"] = outcome(small.load_newest)
    seen["none"] = outcome(Checkpoints(Shelf(folder / "none"), engine, keep=1).load_newest)
    return seen


@contextmanager
def full_disk() -> Iterator[None]:
    """No file grows beyond 64 KiB inside: a disk that is full for weights, but not for the state."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


if __name__ == "__main__":
    take_part(sys.argv, [CASE], run)
