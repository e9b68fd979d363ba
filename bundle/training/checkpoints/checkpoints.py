"""Writes and reads the checkpoints of a run; every rank calls every method, in the same order."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import megatron.core
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from bundle.engine import Engine
from bundle.errors import JobFailed, UsageError
from bundle.mcore import checkpoints as megatron_checkpoints
from bundle.training import atomic
from bundle.training.checkpoints import manifest, randomness, state
from bundle.training.checkpoints.shelf import Shelf
from bundle.training.checkpoints.together import first, together

# Its own folder inside a checkpoint, which Megatron-LM's tools read.
_MEGATRON = "megatron"
# torch's own exception for it is not an Exception.
_WRITING_FAILED = (Exception, CheckpointException)


@dataclass(frozen=True)
class Loaded:
    """Where the run was, and what a person should know about how that was found."""

    state: state.TrainState
    directory: Path
    notes: tuple[str, ...] = ()


class Checkpoints:
    """The checkpoints of one run, for one engine."""

    def __init__(self, shelf: Shelf, engine: Engine, *, keep: int, background: bool = False) -> None:
        """`background`: files are written while training goes on, and `poll` makes them a checkpoint."""
        self.shelf, self.engine, self.keep, self.background = shelf, engine, keep, background
        self._writing: tuple[int, megatron_checkpoints.Writing] | None = None

    def save(self, now: state.TrainState) -> None:
        """Writes a checkpoint; until it is whole it has no name, and the ones before it stay.

        Raises JobFailed, with nothing left half written, when it cannot be written.
        """
        self.poll(wait=True)
        partial = first(lambda: self.shelf.start(now.step))
        together(lambda: self._write_our_part(partial, now))
        engine = self.engine
        try:
            with engine.runtime.megatron():
                if self.background:
                    writing = megatron_checkpoints.Writing(
                        partial / _MEGATRON, engine.models, engine.optimizer
                    )
                    self._writing = (now.step, writing)
                    return
                megatron_checkpoints.save(partial / _MEGATRON, engine.models, engine.optimizer)
        except _WRITING_FAILED as error:
            raise self._given_up(partial, error) from error
        self._publish(now.step)

    def poll(self, *, wait: bool = False) -> int | None:
        """Returns the step whose checkpoint became complete by this call, if any."""
        if self._writing is None:
            return None
        step, writing = self._writing
        try:
            with self.engine.runtime.megatron():
                if not writing.finished(wait=wait):
                    return None
        except _WRITING_FAILED as error:
            raise self._given_up(self.shelf.partial(step), error) from error
        self._writing = None
        self._publish(step)
        return step

    def load_newest(self) -> Loaded | None:
        """Reads the newest checkpoint that is as it was written; None when there is none at all.

        Raises JobFailed when there are some and all are damaged.
        """
        damaged: list[str] = []
        for step in first(self.shelf.steps):
            directory = self.shelf.place(step)
            if reasons := self._damage(directory):
                damaged.append(f"{directory.name} is damaged and was left out: {'; '.join(reasons[:3])}")
                continue
            loaded = self._read(directory)
            return Loaded(loaded.state, directory, (*damaged, *loaded.notes))
        if damaged:
            raise JobFailed(f"{self.shelf.root}: no checkpoint can be used; --fresh starts over", damaged)
        return None

    def load_from(self, directory: Path, *, trusted: bool) -> Loaded:
        """Reads a checkpoint that a person named; `trusted` says that they trust whoever wrote it.

        Raises UsageError for one of another run that nobody vouches for, JobFailed for a damaged one.
        """
        if not trusted and not first(lambda: self.shelf.is_ours(directory)):
            raise UsageError(
                f"{directory}: not written by this run. Reading a checkpoint can run whatever code its files"
                " hold: say --trust-checkpoint if you trust whoever wrote it"
            )
        if reasons := self._damage(directory):
            raise JobFailed(f"{directory}: this checkpoint cannot be used", reasons)
        return self._read(directory)

    def _write_our_part(self, partial: Path, now: state.TrainState) -> None:
        engine = self.engine
        with engine.runtime.megatron():
            randomness.write(partial, dist.get_rank(), engine.device)
        if dist.get_rank() == 0:
            (partial / _MEGATRON).mkdir()
            state.Saved(
                state=now,
                scheduler=engine.scheduler.state_dict(),
                layout=self._layout(),
                sharding=megatron_checkpoints.sharding(),
                mcore=megatron.core.__version__,
            ).write(partial)

    def _given_up(self, partial: Path, error: BaseException) -> Exception:
        """Returns what to raise; megatron tells the cause to rank 0, which explains it and clears up."""
        if dist.get_rank() != 0:
            return RuntimeError("the checkpoint could not be written; rank 0 knows why")
        self.shelf.clear()
        return atomic.failed(partial, error)

    def _publish(self, step: int) -> None:
        partial, rank, size = self.shelf.partial(step), dist.get_rank(), dist.get_world_size()
        names = first(lambda: manifest.files(partial))
        mine = manifest.share(names, rank, size)
        shares = together(lambda: {name: manifest.digest(partial / name, sync=True) for name in mine})

        def finish() -> None:
            manifest.write(partial, {name: found for share in shares for name, found in share.items()})
            self.shelf.publish(step, self.keep)

        first(finish)

    def _damage(self, directory: Path) -> list[str]:
        """Returns what is wrong with a checkpoint, before any of its files has been unpickled."""

        def listed() -> tuple[dict[str, str], list[str]]:
            try:
                state.read(directory)
                digests = manifest.read(directory)
            except ValueError as error:
                return {}, [str(error)]
            return digests, manifest.strangers(directory, digests)

        digests, reasons = first(listed)
        if reasons:
            return reasons
        mine = manifest.share(sorted(digests), dist.get_rank(), dist.get_world_size())
        found = together(lambda: manifest.defects(directory, digests, mine))
        return [defect for share in found for defect in share]

    def _read(self, directory: Path) -> Loaded:
        saved, engine = state.read(directory), self.engine
        with engine.runtime.megatron():
            megatron_checkpoints.load(directory / _MEGATRON, engine.models, engine.optimizer, saved.sharding)
        engine.scheduler.load_state_dict(dict(saved.scheduler))
        if dict(saved.layout) == dict(self._layout()):
            with engine.runtime.megatron():
                randomness.read(directory, dist.get_rank(), engine.device)
            return Loaded(saved.state, directory)
        note = f"{directory.name} was written at {_spelled(saved.layout)}: random states begin anew"
        return Loaded(saved.state, directory, (note,))

    def _layout(self) -> Mapping[str, int]:
        groups = self.engine.groups
        axes = {name: getattr(groups, name).size for name in ("tp", "pp", "cp", "ep", "etp", "dp")}
        return {**axes, "vpp": groups.vpp}


def _spelled(layout: Mapping[str, int]) -> str:
    return " ".join(f"{name}{size}" for name, size in layout.items() if size > 1) or "one rank"
