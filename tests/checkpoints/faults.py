"""Ranks whose checkpoints meet every fault in turn; what became of each is written down."""

import dataclasses
import errno
import io
import pickle
import resource
import shutil
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from bundle.errors import BundleError
from tests.checkpoints.world import make_engine, take_part, train_step
from tests.matrix.cases import ROWS, Case

CASE = Case("faults", {"ep": 2})


class Payload:
    """What a hostile pickle holds: unpickling it makes the file `ran`."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def hostile(checkpoint: Path, mark: Path) -> dict[str, tuple[str, bytes]]:
    """What a stranger may put into a checkpoint: a file's name and what it holds."""
    index = pickle.loads((checkpoint / "megatron" / ".metadata").read_bytes())
    common = io.BytesIO()
    torch.save({"optimizer_step": Payload(mark)}, common)
    beside = pickle.dumps(dataclasses.replace(index, planner_data=Payload(mark)))
    return {
        "code for an index": ("megatron/.metadata", pickle.dumps(Payload(mark))),
        "code in the index": ("megatron/.metadata", beside),
        "code in common state": ("megatron/common.pt", common.getvalue()),
    }


def surprise() -> None:
    if dist.get_rank() == 1:
        raise KeyError("nobody thought of it")


def disguise(checkpoint: Path, place: Path, name: str, content: bytes) -> None:
    """Copies a checkpoint with another file, its manifest made again."""
    from bundle.checkpoints import manifest

    shutil.copytree(checkpoint, place)
    (place / name).write_bytes(content)
    manifest.write(
        place, {listed: manifest.compute_digest(place / listed) for listed in manifest.list_file_names(place)}
    )


class Renumbered:
    """An engine whose model has the same shapes and another arithmetic."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        architecture = engine.recipe.architecture
        changed = {"rotary_base": architecture.rotary_base * 2, "norm_epsilon": 1e-3}
        self.recipe = types.SimpleNamespace(architecture=dataclasses.replace(architecture, **changed))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def run(runtime: Any, folder: Path, _plan: Any) -> dict[str, Any]:
    from bundle.checkpoints.checkpoints import Checkpoints
    from bundle.checkpoints.directory import CheckpointDirectory
    from bundle.checkpoints.state import TrainState
    from bundle.distributed.world import run_and_all_gather_results

    engine = make_engine(CASE, runtime)
    kept = CheckpointDirectory(folder / "ours")
    ours = Checkpoints(kept, engine, keep=9)
    for step in (1, 2, 3):
        train_step(engine, step)
        ours.save(TrainState(step, step * ROWS, "digest"))
    newest, mark = kept.get_path(3), folder / "ran"
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
    seen["foreign"] = outcome(lambda: ours.load_from(elsewhere))
    renumbered: Any = Renumbered(engine)
    seen["another model"] = outcome(lambda: Checkpoints(kept, renumbered, keep=9).load_from(elsewhere))
    alone(lambda: (elsewhere / "megatron" / "common.pt").write_bytes(pickle.dumps(Payload(mark))))
    seen["foreign and tampered"] = outcome(lambda: ours.load_from(elsewhere))
    for kind, (name, content) in hostile(newest, mark).items():
        place = folder / kind
        alone(lambda place=place, name=name, content=content: disguise(newest, place, name, content))
        seen[kind] = outcome(lambda place=place: ours.load_from(place))
        dist.barrier()

    weights = newest / "megatron" / "__1_0.distcp"
    alone(lambda: weights.write_bytes(weights.read_bytes()[:-100]))
    seen["truncated"] = outcome(ours.load_newest)
    alone(lambda: kept.get_path(1).joinpath("state.json").rename(folder / "state.json"))
    alone(lambda: shutil.copytree(kept.get_path(2), folder / "second"))
    alone(lambda: (kept.get_path(2) / "random-00000.safetensors").unlink())
    seen["two damaged"] = outcome(ours.load_newest)
    alone(lambda: shutil.rmtree(kept.get_path(2)))
    alone(lambda: (folder / "second").rename(kept.get_path(2)))
    alone(lambda: (folder / "state.json").rename(kept.get_path(1) / "state.json"))
    second = kept.get_path(2) / "megatron" / "common.pt"
    alone(lambda: second.write_bytes(pickle.dumps(Payload(mark))))
    seen["tampered"] = outcome(ours.load_newest)
    alone(lambda: (kept.get_path(1) / "manifest.json").unlink())
    seen["all damaged"] = outcome(ours.load_newest)
    seen["ran"] = mark.exists()

    full = CheckpointDirectory(folder / "full")
    small = Checkpoints(full, engine, keep=9)
    small.save(TrainState(1, ROWS, "digest"))
    with full_disk(512):
        seen["full disk at random states"] = outcome(lambda: small.save(TrainState(2, 2 * ROWS, "digest")))
    dist.barrier()
    with full_disk(2**16):
        seen["full disk"] = outcome(lambda: small.save(TrainState(2, 2 * ROWS, "digest")))
    dist.barrier()
    with full_disk(2**16), busy_leftovers(type(full)):
        seen["busy full disk"] = outcome(lambda: small.save(TrainState(2, 2 * ROWS, "digest")))
    dist.barrier()
    alone(full.remove_leftovers)
    seen["left behind"] = sorted(path.name for path in full.root.iterdir())
    seen["any error"] = outcome(lambda: run_and_all_gather_results(surprise))
    seen["after full disk"] = outcome(small.load_newest)
    seen["none"] = outcome(Checkpoints(CheckpointDirectory(folder / "none"), engine, keep=1).load_newest)
    return seen


@contextmanager
def busy_leftovers(kind: type) -> Iterator[None]:
    """After the folder is started, it cannot be removed: another rank creates files in it."""
    with patch.object(
        kind, "remove_leftovers", side_effect=[None, OSError(errno.ENOTEMPTY, "Directory not empty")]
    ):
        yield


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file grows beyond `room` bytes inside: 64 KiB are too few for weights, but enough for the state."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


if __name__ == "__main__":
    take_part([CASE], run)
