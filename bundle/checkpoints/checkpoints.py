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
from bundle.checkpoints.base_digests import BackgroundDigests
from bundle.checkpoints.directory import MEGATRON_FOLDER, CheckpointDirectory
from bundle.distributed.world import run_and_all_gather_results, run_on_rank_0
from bundle.engine import Engine
from bundle.errors import BundleError, JobFailed
from bundle.mcore import checkpoints as megatron_checkpoints
from bundle.mcore import groups

# torch's own exception is not an Exception.
_ANY_EXCEPTION_TYPES = (Exception, CheckpointException)


@dataclass(frozen=True)
class LoadedCheckpoint:
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
        base_digests: BackgroundDigests | None = None,
        on_published: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`background`: files are written while training goes on, and `poll` makes them a checkpoint.

        `base_digests` are of the weights that the engine's adapters belong to. Rank 0 calls `on_published`
        with the step of each checkpoint that is complete.
        """
        self.directory, self.engine, self.keep, self.background = directory, engine, keep, background
        self._base_digests, self.on_published = base_digests, on_published
        self.best_step: int | None = None  # of the checkpoint that stays whatever comes after it
        self._writing: tuple[int, megatron_checkpoints.AsyncSave] | None = None

    def save(self, train_state: state.TrainState) -> None:
        """Write a checkpoint; it gets its name when it is complete, and earlier ones stay until then.

        Raises JobFailed, with nothing left half written, when it cannot be written.
        """
        self.poll(wait=True)
        self.engine.gather_weights()
        base_digests = self._gather_base_digests()
        partial = run_on_rank_0(lambda: self.directory.create_sole_partial(train_state.step))
        engine = self.engine
        with self._clear_on_failure(partial):
            run_and_all_gather_results(lambda: self._write_rng_and_state(partial, train_state, base_digests))
            with engine.runtime.megatron_calls():
                if self.background:
                    writing = megatron_checkpoints.AsyncSave(
                        partial / MEGATRON_FOLDER, engine.checkpoint_modules, engine.optimizer
                    )
                    self._writing = (train_state.step, writing)
                    return
                megatron_checkpoints.save(
                    partial / MEGATRON_FOLDER, engine.checkpoint_modules, engine.optimizer
                )
            self._publish(train_state.step)

    def poll(self, *, wait: bool = False) -> int | None:
        """Return the step whose checkpoint became complete by this call, or None."""
        if self._writing is None:
            return None
        step, writing = self._writing
        with self._clear_on_failure(self.directory.get_partial_path(step)):
            with self.engine.runtime.megatron_calls():
                if not writing.is_finished(wait=wait):
                    return None
            self._writing = None
            self._publish(step)
        return step

    def load_newest(self) -> LoadedCheckpoint | None:
        """Read the newest checkpoint that is not damaged; return None where there is no checkpoint.

        Raises JobFailed where all checkpoints are damaged.
        """
        damaged: list[str] = []
        for step in run_on_rank_0(self.directory.list_steps_newest_first):
            directory = self.directory.get_path(step)
            if reasons := self._find_damage(directory):
                damaged.append(f"{directory.name} is damaged and was skipped: {'; '.join(reasons[:3])}")
                continue
            loaded = self._load_into_engine(directory)
            new_names = run_on_rank_0(functools.partial(self.directory.mark_newer_damaged, step))
            notes = [
                f"{reason}; the checkpoint was renamed to {name}"
                for reason, name in zip(damaged, new_names, strict=True)
            ]
            return LoadedCheckpoint(loaded.state, directory, (*notes, *loaded.notes))
        if damaged:
            raise JobFailed(
                f"{self.directory.root}: no checkpoint can be used. Start over with --fresh.", damaged
            )
        return None

    def load_from(self, directory: Path) -> LoadedCheckpoint:
        """Read a checkpoint that a person named; raise JobFailed for a damaged one."""
        self._refuse_damaged(directory)
        return self._load_into_engine(directory)

    def load_weights(self, directory: Path) -> None:
        """Read the weights of a checkpoint that a person named, whatever optimizer and data they come from.

        Optimizer, schedule and random states stay those of a new run. Raises UsageError for the checkpoint of
        another model, JobFailed for a damaged checkpoint and for one that cannot be loaded.
        """
        self._refuse_damaged(directory)
        self._read_saved(directory)
        engine = self.engine
        with (
            _wrap_load_errors(directory / MEGATRON_FOLDER) as megatron_directory,
            engine.runtime.megatron_calls(),
        ):
            megatron_checkpoints.load_weights(megatron_directory, engine.checkpoint_modules, engine.optimizer)

    def _refuse_damaged(self, directory: Path) -> None:
        if reasons := self._find_damage(directory):
            raise JobFailed(f"{directory}: this checkpoint cannot be used", reasons)

    def _gather_base_digests(self) -> Mapping[str, str] | None:
        return self._base_digests.gather() if self._base_digests else None

    def _write_rng_and_state(
        self, partial: Path, train_state: state.TrainState, base_digests: Mapping[str, str] | None
    ) -> None:
        engine = self.engine
        with engine.runtime.megatron_calls():
            rng.write(partial, dist.get_rank(), engine.device)
        if dist.get_rank() == 0:
            (partial / MEGATRON_FOLDER).mkdir()
            state.SavedState(
                state=train_state,
                scheduler=engine.scheduler.state_dict(),
                layout=self._get_layout(),
                sharding=megatron_checkpoints.choose_sharding_type(),
                optimizer=state.describe_optimizer_state_format(engine.recipe.optimizer),
                mcore=megatron_checkpoints.read_megatron_version(),
                model=identity.dump_architecture(engine.recipe.architecture),
                adapters=state.describe_adapters(engine.recipe, loaded=engine.has_pretrained_weights),
                base_digests=base_digests,
            ).write(partial)

    @contextmanager
    def _clear_on_failure(self, partial: Path) -> Iterator[None]:
        """Remove half-written files when the block fails, and let rank 0 raise the reason."""
        try:
            yield
        except BundleError:  # the same on all ranks
            if dist.get_rank() == 0:
                self._clear_leftovers()
            raise
        except _ANY_EXCEPTION_TYPES as error:
            # Megatron tells the cause to rank 0.
            if dist.get_rank() == 0:
                self._clear_leftovers()
            elif not files.is_disk_full(error):
                cause = _describe_first_rank_failure(error)  # or what this rank alone has seen
                raise RuntimeError(
                    f"the checkpoint could not be written; rank 0 knows why ({cause})"
                ) from error
            raise files.build_write_error(partial, error) from error

    def _clear_leftovers(self) -> None:
        """Remove what was half written; the next checkpoint removes what ranks that still write add to it."""
        with suppress(OSError):
            self.directory.remove_leftovers()

    def _publish(self, step: int) -> None:
        partial, rank, size = self.directory.get_partial_path(step), dist.get_rank(), dist.get_world_size()
        names = run_on_rank_0(lambda: manifest.list_file_names(partial))
        own_names = manifest.select_files_by_writer_rank(names, rank, size)
        shares = run_and_all_gather_results(
            lambda: {name: manifest.compute_digest(partial / name, sync=True) for name in own_names}
        )

        def finish() -> None:
            manifest.write(partial, {name: digest for share in shares for name, digest in share.items()})
            self.directory.publish(step, self.keep, self.best_step)
            self.on_published(step)

        run_on_rank_0(finish)

    def _find_damage(self, directory: Path) -> list[str]:
        """Return the defects of a checkpoint, found before megatron reads any of its files."""

        def list_digests() -> tuple[dict[str, str], list[str]]:
            try:
                state.read(directory)
                digests = manifest.read(directory)
            except ValueError as error:
                return {}, [str(error)]
            return digests, manifest.describe_unlisted_files(directory, digests)

        digests, reasons = run_on_rank_0(list_digests)
        if reasons:
            return reasons
        own_names = manifest.select_files_by_writer_rank(
            sorted(digests), dist.get_rank(), dist.get_world_size()
        )
        shares = run_and_all_gather_results(lambda: manifest.find_defects(directory, digests, own_names))
        return [defect for share in shares for defect in share]

    def _load_into_engine(self, directory: Path) -> LoadedCheckpoint:
        """Read a checkpoint.

        Raises UsageError for a checkpoint of another model or optimizer, JobFailed for one that cannot be
        loaded.
        """
        saved, engine = self._read_saved(directory), self.engine
        state.refuse_another_optimizer(directory, saved, engine.recipe.optimizer)
        with (
            _wrap_load_errors(directory / MEGATRON_FOLDER) as megatron_directory,
            engine.runtime.megatron_calls(),
        ):
            megatron_checkpoints.load(
                megatron_directory, engine.checkpoint_modules, engine.optimizer, saved.sharding
            )
        engine.scheduler.load_state_dict(dict(saved.scheduler))
        if dict(saved.layout) == dict(self._get_layout()):
            with engine.runtime.megatron_calls():
                rng.restore(directory, dist.get_rank(), engine.device)
            return LoadedCheckpoint(saved.state, directory)
        with engine.runtime.megatron_calls():
            groups.seed_model_parallel_rng(engine.recipe.seed, completed_steps=saved.state.step)
        note = (
            f"{directory.name} was written with another parallel layout ({_format_layout(saved.layout)})."
            " So random states are not loaded, but start again from the seed"
        )
        return LoadedCheckpoint(saved.state, directory, (note,))

    def _read_saved(self, directory: Path) -> state.SavedState:
        """Return the saved state of a checkpoint. Raises UsageError for another model or other adapters."""
        saved = state.read(directory)
        state.refuse_another_model(
            directory, saved, self.engine.recipe, loaded=self.engine.has_pretrained_weights
        )
        state.refuse_other_weights(directory, saved, self._gather_base_digests())
        return saved

    def _get_layout(self) -> Mapping[str, int]:
        groups = self.engine.groups
        axes = {name: getattr(groups, name).size for name in ("tp", "pp", "cp", "ep", "etp", "dp")}
        return {**axes, "vpp": groups.vpp}


@contextmanager
def _wrap_load_errors(directory: Path) -> Iterator[Path]:
    """Raise JobFailed for any error of megatron's while it reads `directory`."""
    try:
        yield directory
    except _ANY_EXCEPTION_TYPES as error:
        raise JobFailed(f"{directory}: cannot be loaded: {_describe_first_rank_failure(error)}") from error


def _describe_first_rank_failure(error: BaseException) -> str:
    """Return one rank's error from torch's exception of all ranks; other errors as they are."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    first_failure = next((failure for failure, _ in failures.values()), error)
    return f"{type(first_failure).__name__}: {first_failure}"


def _format_layout(layout: Mapping[str, int]) -> str:
    return " ".join(f"{name}{size}" for name, size in layout.items() if size > 1) or "one rank"
