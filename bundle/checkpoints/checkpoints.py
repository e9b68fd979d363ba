"""Writes and reads the checkpoints of a run; every rank calls every method, in the same order."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from bundle import files
from bundle.architectures import identity
from bundle.checkpoints import manifest, rng, state
from bundle.checkpoints.directory import MEGATRON, CheckpointDirectory
from bundle.distributed.world import on_all_ranks, on_rank_0
from bundle.engine import Engine
from bundle.errors import BundleError, JobFailed
from bundle.mcore import checkpoints as megatron_checkpoints
from bundle.mcore import groups

# torch's own exception is not an Exception.
_MEGATRON_FAILED = (Exception, CheckpointException)


@dataclass(frozen=True)
class Loaded:
    """Where the run was, and what a person should know about how that was found."""

    state: state.TrainState
    directory: Path
    notes: tuple[str, ...] = ()


class Checkpoints:
    """The checkpoints of one run, for one engine."""

    def __init__(
        self,
        directory: CheckpointDirectory,
        engine: Engine,
        *,
        keep: int,
        background: bool = False,
        beside: Mapping[str, str] | None = None,
        when_published: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`background`: files are written while training goes on, and `poll` makes them a checkpoint.

        `beside`: the digests of the weights that the engine's adapters are of, as `state.Saved` has them.
        Rank 0 calls `when_published` with the step of each checkpoint that is complete.
        """
        self.directory, self.engine, self.keep, self.background = directory, engine, keep, background
        self.beside, self.when_published = beside, when_published
        self._writing: tuple[int, megatron_checkpoints.Writing] | None = None

    def save(self, now: state.TrainState) -> None:
        """Writes a checkpoint; until it is whole it has no name, and the ones before it stay.

        Raises JobFailed, with nothing left half written, when it cannot be written.
        """
        self.poll(wait=True)
        self.engine.gather_weights()
        partial = on_rank_0(lambda: self.directory.start(now.step))
        engine = self.engine
        with self._whole_or_not(partial):
            on_all_ranks(lambda: self._write_our_part(partial, now))
            with engine.runtime.megatron():
                if self.background:
                    writing = megatron_checkpoints.Writing(partial / MEGATRON, engine.kept, engine.optimizer)
                    self._writing = (now.step, writing)
                    return
                megatron_checkpoints.save(partial / MEGATRON, engine.kept, engine.optimizer)
            self._publish(now.step)

    def poll(self, *, wait: bool = False) -> int | None:
        """The step whose checkpoint became complete by this call, if any."""
        if self._writing is None:
            return None
        step, writing = self._writing
        with self._whole_or_not(self.directory.partial(step)):
            with self.engine.runtime.megatron():
                if not writing.finished(wait=wait):
                    return None
            self._writing = None
            self._publish(step)
        return step

    def load_newest(self) -> Loaded | None:
        """Reads the newest checkpoint that is as it was written; None when there is none at all.

        Raises JobFailed when there are some and all are damaged.
        """
        damaged: list[str] = []
        for step in on_rank_0(self.directory.steps):
            directory = self.directory.place(step)
            if reasons := self._damage(directory):
                damaged.append(f"{directory.name} is damaged and was left out: {'; '.join(reasons[:3])}")
                continue
            loaded = self._read(directory)
            aside = on_rank_0(functools.partial(self.directory.go_back_to, step))
            notes = [f"{why}; it lies in {name} now" for why, name in zip(damaged, aside, strict=True)]
            return Loaded(loaded.state, directory, (*notes, *loaded.notes))
        if damaged:
            raise JobFailed(f"{self.directory.root}: no checkpoint can be used; --fresh starts over", damaged)
        return None

    def load_from(self, directory: Path) -> Loaded:
        """Reads a checkpoint that a person named; raises JobFailed for a damaged one."""
        self._refuse_damaged(directory)
        return self._read(directory)

    def load_weights(self, directory: Path) -> None:
        """Reads the weights of a checkpoint that a person named, whatever optimizer and data they come from.

        Optimizer, schedule and random states stay those of a beginning. Raises UsageError for those of
        another model, JobFailed for a damaged checkpoint and for one that cannot be loaded.
        """
        self._refuse_damaged(directory)
        self._saved(directory)
        engine = self.engine
        with _loading(directory / MEGATRON) as place, engine.runtime.megatron():
            megatron_checkpoints.load_weights(place, engine.kept, engine.optimizer)

    def _refuse_damaged(self, directory: Path) -> None:
        if reasons := self._damage(directory):
            raise JobFailed(f"{directory}: this checkpoint cannot be used", reasons)

    def _write_our_part(self, partial: Path, now: state.TrainState) -> None:
        engine = self.engine
        with engine.runtime.megatron():
            rng.write(partial, dist.get_rank(), engine.device)
        if dist.get_rank() == 0:
            (partial / MEGATRON).mkdir()
            state.Saved(
                state=now,
                scheduler=engine.scheduler.state_dict(),
                layout=self._layout(),
                sharding=megatron_checkpoints.sharding(),
                optimizer=state.optimizer_kept(engine.recipe.optimizer),
                mcore=megatron_checkpoints.version(),
                model=identity.noted(engine.recipe.architecture),
                adapters=state.adapters_kept(engine.recipe, loaded=engine.loaded),
                beside=self.beside,
            ).write(partial)

    @contextmanager
    def _whole_or_not(self, partial: Path) -> Iterator[None]:
        """Leaves nothing half written when what is inside fails, and has rank 0 say why."""
        try:
            yield
        except BundleError:  # the same on all ranks
            if dist.get_rank() == 0:
                self._clear_leftovers()
            raise
        except _MEGATRON_FAILED as error:
            # Megatron tells the cause to rank 0.
            if dist.get_rank() != 0:
                why = _cause(error)  # or what this rank alone has seen
                raise RuntimeError(
                    f"the checkpoint could not be written; rank 0 knows why ({why})"
                ) from error
            self._clear_leftovers()
            raise files.failed(partial, error) from error

    def _clear_leftovers(self) -> None:
        """Remove what was half written; the next checkpoint removes what ranks that still write add to it."""
        with suppress(OSError):
            self.directory.clear()

    def _publish(self, step: int) -> None:
        partial, rank, size = self.directory.partial(step), dist.get_rank(), dist.get_world_size()
        names = on_rank_0(lambda: manifest.file_names(partial))
        mine = manifest.share(names, rank, size)
        shares = on_all_ranks(lambda: {name: manifest.digest(partial / name, sync=True) for name in mine})

        def finish() -> None:
            manifest.write(partial, {name: found for share in shares for name, found in share.items()})
            self.directory.publish(step, self.keep)
            self.when_published(step)

        on_rank_0(finish)

    def _damage(self, directory: Path) -> list[str]:
        """What is wrong with a checkpoint, before any of its files is read."""

        def listed() -> tuple[dict[str, str], list[str]]:
            try:
                state.read(directory)
                digests = manifest.read(directory)
            except ValueError as error:
                return {}, [str(error)]
            return digests, manifest.strangers(directory, digests)

        digests, reasons = on_rank_0(listed)
        if reasons:
            return reasons
        mine = manifest.share(sorted(digests), dist.get_rank(), dist.get_world_size())
        found = on_all_ranks(lambda: manifest.defects(directory, digests, mine))
        return [defect for share in found for defect in share]

    def _read(self, directory: Path) -> Loaded:
        """Raises UsageError for another model's or optimizer's, JobFailed for one that cannot be loaded."""
        saved, engine = self._saved(directory), self.engine
        state.refuse_another_optimizer(directory, saved, engine.recipe.optimizer)
        with _loading(directory / MEGATRON) as place, engine.runtime.megatron():
            megatron_checkpoints.load(place, engine.kept, engine.optimizer, saved.sharding)
        engine.scheduler.load_state_dict(dict(saved.scheduler))
        if dict(saved.layout) == dict(self._layout()):
            with engine.runtime.megatron():
                rng.read(directory, dist.get_rank(), engine.device)
            return Loaded(saved.state, directory)
        with engine.runtime.megatron():
            groups.begin_random(engine.recipe.seed, after=saved.state.step)
        note = f"{directory.name} was written at {_spelled(saved.layout)}: random states begin anew"
        return Loaded(saved.state, directory, (note,))

    def _saved(self, directory: Path) -> state.Saved:
        """What a checkpoint says of itself. Raises UsageError for another model's, or other adapters."""
        saved = state.read(directory)
        state.refuse_another_model(directory, saved, self.engine.recipe, loaded=self.engine.loaded)
        state.refuse_other_weights(directory, saved, self.beside)
        return saved

    def _layout(self) -> Mapping[str, int]:
        groups = self.engine.groups
        axes = {name: getattr(groups, name).size for name in ("tp", "pp", "cp", "ep", "etp", "dp")}
        return {**axes, "vpp": groups.vpp}


@contextmanager
def _loading(place: Path) -> Iterator[Path]:
    """Raises JobFailed for whatever megatron raises while it reads `place`."""
    try:
        yield place
    except _MEGATRON_FAILED as error:
        raise JobFailed(f"{place}: cannot be loaded: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    """What torch's exception of all ranks says of one of them; other errors as they are."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    first_failure = next((failure for failure, _ in failures.values()), error)
    return f"{type(first_failure).__name__}: {first_failure}"


def _spelled(layout: Mapping[str, int]) -> str:
    return " ".join(f"{name}{size}" for name, size in layout.items() if size > 1) or "one rank"
