"""The directory of one run: its start and everything that it produced."""

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from bundle import files
from bundle.checkpoints import manifest, state
from bundle.checkpoints.directory import CheckpointDirectory
from bundle.errors import EnvironmentUnfit, UsageError
from bundle.launch import LOCK_FILE, Start
from bundle.planning import Problem
from bundle.planning.inputs import InitialWeights, find_input_output_problems, inspect_weights, to_problems
from bundle.planning.size import DiskUsage, estimate_checkpoint_export_disk
from bundle.recipe import Recipe, list_differences, load
from bundle.recipe.document import to_yaml

# The first line of a run's recipe.yaml, which marks the directory of a run.
_RECIPE_HEADER = "# The recipe of the run in this directory, written by mcore-bundle.\n"
# The names that a directory may have before its first run: logs, tokens, and names of the file system.
_ALLOWED_NAMES = {"logs", "data", "lost+found"}
_MAX_NAMED_FILES = 8  # the most foreign files in a message
# The time for processes of a launch that was killed to end: its ranks end within 5 seconds.
_LOCK_SECONDS, _LOCK_POLL_SECONDS = 5.0, 0.1
_EXPORT_NAME_PATTERN = re.compile(r"(hf|peft)(-\d{8,})?")


class Origin(NamedTuple):
    """The checkpoint that a run begins with, as the user named it, and whether only its weights are used."""

    checkpoint: Path
    weights_only: bool = False

    @classmethod
    def from_start(cls, start: Start) -> "Origin | None":
        """Return the origin that a start names; None where it names none."""
        return cls(start.origin.absolute(), start.weights_only) if start.origin else None

    def __str__(self) -> str:
        return f"{'--weights-only ' if self.weights_only else ''}--from {self.checkpoint}"


class DirectoryInUse(UsageError):
    """The error that another run uses a run directory; `holder` describes its process."""

    def __init__(self, root: Path, holder: str) -> None:
        super().__init__(f"{root}: another run is using it ({holder})")
        self.holder = holder


class RunDirectory:
    """The paths in a run directory; none needs to exist."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.recipe = root / "recipe.yaml"  # the complete recipe; a resume is compared with it
        # The job file that the ranks execute.
        self.job = root / "job.json"
        self.versions = root / "versions.json"  # of the installed packages
        # The checkpoint that the run began with, as the user named it; missing where there was none.
        self.origin = root / "origin.json"
        # The identifiers of this run in experiment trackers; missing where the recipe has no tracker.
        self.trackers = root / "trackers.json"
        self.profile = root / "profile"  # traces of the steps that the recipe names
        self.metrics = root / "metrics.jsonl"  # one JSON object per line, each with its `step`
        self.tensorboard = root / "tensorboard"  # event files
        self.reference = root / "reference.npz"  # the reference's log-probabilities of preference data
        self.checkpoints = root / "checkpoints"  # one folder per checkpoint
        # The logs of each launch's ranks; a fresh start keeps them, as its own log is there.
        self.logs = root / "logs"
        self.rollouts = root / "rollouts"  # answers of task rl, a file for each step
        self.result = root / "result.json"  # exists only for a finished run

    def build_export_path(self, kind: str, step: int | None = None) -> Path:
        """Return the path of an export of that kind (checkpoint.export).

        `step` is the step of an export before the last one, which is part of its name. An export is the
        trained model in Hugging Face's format, or its adapters in PEFT's format.
        """
        name = "peft" if kind == "peft" else "hf"
        return self.root / (name if step is None else f"{name}-{step:08d}")

    @property
    def exports(self) -> list[Path]:
        """The paths of all existing exports."""
        inside = self.root.glob("*") if files.is_directory(self.root) else ()
        return [path for path in inside if _EXPORT_NAME_PATTERN.fullmatch(path.name)]

    def estimate_disk(self, recipe: Recipe) -> DiskUsage:
        """Return the disk space of a run of that recipe, with what an earlier launch has written here."""
        steps = CheckpointDirectory(self.checkpoints).list_steps_newest_first()
        return estimate_checkpoint_export_disk(recipe, self.root, len(steps), len(self.exports))

    def read_job_file_stamp(self) -> tuple[int, int] | None:
        """Return a value that identifies the start that wrote the job file; None where there is none."""
        if not files.is_file(self.job):
            return None
        status = self.job.stat()
        return status.st_ino, status.st_mtime_ns

    def decide_resume(self, recipe: Recipe, start: Start) -> bool:
        """Return whether there is a run to resume; nothing is changed.

        An unfinished run resumes without a flag, as a scheduler starts the same command again. A run that has
        trained nothing begins anew, so its recipe can be corrected.

        Raise UsageError for a finished run without a flag, and for a recipe or an origin that is not the
        run's. Raise it also for --resume without a run, and for files that no run of ours has written.
        """
        if start.fresh and start.resume:
            raise UsageError("--fresh starts over and --resume continues. Use only one of them")
        self._refuse_foreign_files()
        lora = recipe.model.lora
        adapter = lora.path if lora else None
        self._refuse_own_export({"model.path": recipe.model.path, "model.lora.path": adapter})
        if not files.is_file(self.recipe):
            if start.resume:
                raise UsageError(f"{self.root}: there is no run to resume. Leave --resume out to start one")
            return False
        if start.fresh:
            self._refuse_removing_start_checkpoint(start.origin)
            return False
        if not start.resume and not self._has_progress():
            return False
        if self.has_required_results(recipe) and not start.resume:
            raise UsageError(
                f"{self.root}: this run is finished. --fresh overwrites it. To continue it with --resume,"
                " raise train.steps, or change train.early_stop if an early stop ended it"
            )
        self._refuse_other_recipe(recipe, longer=start.resume)
        self._refuse_other_origin(Origin.from_start(start))
        return True

    def find_problems(self, recipe: Recipe, start: Start) -> tuple[Problem, ...]:
        """Return the problems for which `decide_resume` would refuse a run here."""
        try:
            self.decide_resume(recipe, start)
        except UsageError as error:
            return tuple(to_problems(error))
        return ()

    def describe_weights_and_problems(self, recipe: Recipe, start: Start) -> tuple[str, list[Problem]]:
        """Return a description of the model's first weights, and the problems of inputs and directory."""
        weights = self.find_initial_weights(recipe, start)
        input_problems = find_input_output_problems(recipe, self.root, weights)
        return weights.description, [*input_problems, *self.find_problems(recipe, start)]

    def has_required_results(self, recipe: Recipe) -> bool:
        """Return whether the run has its result and `recipe` requires nothing more.

        More is required by more steps or epochs, by a missing export, and by another early stop, or none,
        where one has ended the run.
        """
        export = recipe.checkpoint.export
        if not files.is_file(self.result) or (
            export is not None and not self.build_export_path(export).is_dir()
        ):
            return False
        try:
            result = json.loads(self.result.read_text(encoding="utf-8"))
            step, ended_by = result.get("step"), result.get("early_stop")
        except (ValueError, AttributeError):
            return True
        if ended_by is not None:
            rule = recipe.train.early_stop
            return rule is not None and rule.dump() == ended_by
        if recipe.train.epochs is not None:  # only the data tells the number of steps
            return not recipe.train.exceeds(load(self.recipe).train)
        return not isinstance(step, int) or step >= recipe.train.steps

    def format_finished_run_advice(self) -> str:
        """Return the message for a user who resumes a finished run."""
        return (
            f"{self.root}: this run is finished. To continue it with --resume, raise train.steps, or change"
            " train.early_stop if an early stop ended it"
        )

    def find_initial_weights(self, recipe: Recipe, start: Start) -> InitialWeights:
        """Return the weights that the run begins with, or the problems of them.

        --from counts until the run has a checkpoint of its own.
        """
        if start.origin is None:
            return inspect_weights(recipe)
        # A run with adapters needs the weights of model.path too, whatever the adapters begin with.
        base = inspect_weights(recipe) if recipe.model.lora else InitialWeights("")
        if not start.fresh and CheckpointDirectory(self.checkpoints).list_steps_newest_first():
            return base._replace(description="the run's own newest checkpoint")
        try:
            again = not start.fresh and self.read_origin() == Origin.from_start(start)
            checkpoint = self.find_origin_checkpoint() if again else None
            checkpoint = checkpoint or find_starting_checkpoint(start.origin)
            _refuse_misfit(checkpoint, recipe, base, weights_only=start.weights_only)
        except UsageError as error:
            return InitialWeights("", (*base.problems, *to_problems(error)))
        if start.weights_only:
            description = f"{checkpoint}: only the weights; optimizer, schedule and data start at step 0"
        else:
            description = (
                f"{checkpoint}: weights, optimizer state and progress; the run continues with the same data"
            )
        return base._replace(description=description)

    def read_origin(self) -> Origin | None:
        """Return the --from of this run; None where it had none."""
        if not files.is_file(self.origin):
            return None
        record = json.loads(self.origin.read_text(encoding="utf-8"))
        return Origin(Path(record["from"]), record.get("weights_only", False))

    def find_origin_checkpoint(self) -> Path | None:
        """Return the checkpoint that --from was when the run began, as that run may have later ones.

        Return None where the run began without one. Raise UsageError where the checkpoint is gone or has
        changed.
        """
        if not files.is_file(self.origin):
            return None
        record = json.loads(self.origin.read_text(encoding="utf-8"))
        checkpoint = find_starting_checkpoint(Path(record.get("checkpoint", record["from"])))
        if record.get("manifest") not in (None, manifest.compute_digest(checkpoint / manifest.FILE_NAME)):
            raise UsageError(
                f"{checkpoint}: this checkpoint changed after {self.root} started from it. Restore it, use"
                " another run directory, or overwrite the run with --fresh"
            )
        return checkpoint

    def read_origin_digest(self) -> str:
        """Return the digest of the checkpoint that the run began with; empty where there is none."""
        if not files.is_file(self.origin):
            return ""
        return str(json.loads(self.origin.read_text(encoding="utf-8")).get("manifest", ""))

    def remove_results_and_write_start(
        self,
        recipe: Recipe,
        job: Mapping[str, Any],
        versions: Mapping[str, Any],
        origin: Origin | None = None,
    ) -> None:
        """Write the start of this run, after an earlier run's files except its logs are removed.

        Nothing else is removed; the reference's file records its own inputs. If it is interrupted, the
        earlier run is at an older checkpoint, or nothing is left of it.
        """
        self.result.unlink(missing_ok=True)
        CheckpointDirectory(self.checkpoints).remove_all()
        for exported in self.exports:
            if exported.exists():
                shutil.rmtree(exported.resolve())  # the export may be a link to a larger disk
        for path in (
            *self.tensorboard.glob("events.out.tfevents.*"),
            self.metrics,
            self.origin,
            self.trackers,
        ):
            path.unlink(missing_ok=True)
        self.root.mkdir(parents=True, exist_ok=True)
        self._write_recipe(recipe)
        if origin is not None:
            record = {"from": str(origin.checkpoint), "weights_only": origin.weights_only}
            if checkpoint := find_newest_checkpoint(origin.checkpoint):
                record |= {
                    "checkpoint": str(checkpoint),
                    "manifest": manifest.compute_digest(checkpoint / manifest.FILE_NAME),
                }
            files.write_json(self.origin, record)
        self._write_job_and_versions(job, versions)

    def write_resume(self, recipe: Recipe, job: Mapping[str, Any], versions: Mapping[str, Any]) -> None:
        """Write the recipe, job and versions of a resumed run, which may be longer or on other machines."""
        self.result.unlink(missing_ok=True)
        self._write_recipe(recipe)
        self._write_job_and_versions(job, versions)

    def rewind_metrics(self, step: int) -> None:
        """Remove the metrics that an interrupted run wrote after `step`.

        The resumed run writes them again.
        """
        if not self.metrics.exists():
            return
        lines = [line for line in _read_lines(self.metrics) if _is_up_to_step(step, line)]
        files.write_text(self.metrics, "".join(f"{line}\n" for line in lines))

    @contextmanager
    def hold_lock(self, place: str = "", *, joins_launcher: bool = False) -> Iterator[None]:
        """Lock the directory for this process within the context; the kernel releases the lock at its end.

        The launcher of rank 0 and rank 0, which joins it, hold the lock together: it is free once both have
        ended. `place` is where the nodes meet. Raise DirectoryInUse while another run holds the lock,
        UsageError where the file system has no locks, EnvironmentUnfit where nothing can be written.
        """
        with self._open_lock() as file:
            # A fork shares the lock and may outlive this process, so it closes the file at once.
            os.register_at_fork(after_in_child=file.close)
            try:
                if not joins_launcher:
                    _acquire_lock_or_time_out(file)
                    file.truncate(0)
                    file.write(f"process {os.getpid()} on {socket.gethostname()}{place}")
                    file.flush()
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise DirectoryInUse(self.root, file.read()) from None
            except OSError as error:
                raise UsageError(
                    f"{self.root}: the file system has no file locks ({error.strerror}), so two runs could"
                    " use this directory at the same time. Mount the file system with flock, or name another"
                    " directory with --run-directory"
                ) from error
            yield

    def _open_lock(self) -> TextIO:
        """Open the lock's file; raise UsageError for a symbolic link, whose target is another file."""
        path = self.root / LOCK_FILE
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o640)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UsageError(
                    f"{path}: is a symbolic link, and a run would overwrite its target. Remove the link"
                ) from None
            raise EnvironmentUnfit(
                f"{path}: cannot be written: {error.strerror}. Name another directory with --run-directory"
            ) from error
        return os.fdopen(descriptor, "a+", encoding="utf-8")

    def _has_progress(self) -> bool:
        """Return whether a fresh start would lose anything."""
        noted = self.metrics.exists() and not all(
            _is_up_to_step(0, line) for line in _read_lines(self.metrics)
        )
        return (
            noted
            or self.result.exists()
            or bool(CheckpointDirectory(self.checkpoints).list_steps_newest_first())
        )

    def _refuse_foreign_files(self) -> None:
        """Raise UsageError for files that no run has written; a new or empty directory is allowed."""
        try:
            if files.is_file(self.recipe) and self.recipe.read_bytes().startswith(_RECIPE_HEADER.encode()):
                return
            foreign_names = sorted(path.name for path in self.root.iterdir() if _is_foreign_entry(path))
        except PermissionError as error:
            raise UsageError(
                f"--run-directory {self.root}: cannot be read ({error.strerror}). Name another directory"
            ) from error
        except (OSError, ValueError):  # there is no directory; `planning.inputs` reports a file in its place
            return
        if foreign_names:
            more = (
                f" and {len(foreign_names) - _MAX_NAMED_FILES} more"
                if len(foreign_names) > _MAX_NAMED_FILES
                else ""
            )
            raise UsageError(
                f"--run-directory {self.root}: has files"
                f" ({', '.join(foreign_names[:_MAX_NAMED_FILES])}{more}), but no recipe.yaml that a"
                " run wrote. Name an empty or a new directory, or restore the run's recipe.yaml"
            )

    def _refuse_own_export(self, model_paths: Mapping[str, str | None]) -> None:
        export_paths = {self.build_export_path(kind).resolve() for kind in ("hf", "peft")} | {
            place.resolve() for place in self.exports
        }
        for key, path in model_paths.items():
            if path is not None and any(Path(path).resolve().is_relative_to(place) for place in export_paths):
                raise UsageError(
                    f"{key} {path}: this run would overwrite this input with its export. Name another run"
                    " directory with --run-directory"
                )

    def _refuse_removing_start_checkpoint(self, start_from: Path | None) -> None:
        if start_from is not None and start_from.resolve().is_relative_to(self.root.resolve()):
            raise UsageError(
                f"--fresh would remove {start_from} before the run could start from it. Name another"
                " directory with --run-directory"
            )

    def _refuse_other_recipe(self, recipe: Recipe, *, longer: bool) -> None:
        saved = load(self.recipe)
        changed = [change for change in list_differences(saved, recipe) if not change.is_free_on_resume]
        if longer and recipe.train.exceeds(saved.train):
            changed = [change for change in changed if change.key not in ("train.steps", "train.epochs")]
        if changed:
            raise UsageError(
                f"{self.root} has a run of another recipe. Change the recipe back, use another run"
                " directory, or overwrite the run with --fresh. For more train.steps, use --resume",
                [str(change) for change in changed],
            )

    def _refuse_other_origin(self, origin: Origin | None) -> None:
        before = self.read_origin()
        if origin is not None and origin != before:
            raise UsageError(
                f"{self.root} has a run that started {f'with {before}' if before else 'without --from'}, not"
                f" with {origin}. Leave out --from to continue it, use another run directory, or overwrite"
                " the run with --fresh"
            )

    def _write_recipe(self, recipe: Recipe) -> None:
        files.write_text(self.recipe, _RECIPE_HEADER + to_yaml(recipe.dump()))

    def _write_job_and_versions(self, job: Mapping[str, Any], versions: Mapping[str, Any]) -> None:
        files.write_json(self.job, job)
        files.write_json(self.versions, versions)


def _acquire_lock_or_time_out(file: TextIO) -> None:
    """Lock a file that nobody else holds, once the processes of an earlier launch have ended.

    Raise BlockingIOError where another process still holds it after _LOCK_SECONDS.
    """
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOCK_POLL_SECONDS)
        else:
            return


def _is_foreign_entry(path: Path) -> bool:
    """Return whether a path in a directory without a run prevents a run from beginning there."""
    if path.name in _ALLOWED_NAMES or path.name.startswith("."):
        return False
    return not files.is_directory(path) or any(path.iterdir())


def find_newest_checkpoint(path: Path) -> Path | None:
    """Return the checkpoint `path`, or the newest one of the run or folder `path`; None if none."""
    if files.is_file(path / manifest.FILE_NAME):
        return path
    for folder in (path, RunDirectory(path).checkpoints):
        directory = CheckpointDirectory(folder)
        if steps := directory.list_steps_newest_first():
            return directory.get_path(steps[0])
    return None


def find_starting_checkpoint(path: Path) -> Path:
    """Return the checkpoint `path`, or the newest one of the run or folder `path`.

    Raise UsageError where there is none.
    """
    if (checkpoint := find_newest_checkpoint(path)) is not None:
        return checkpoint
    if not (files.is_directory(path) or files.is_file(path)):
        raise UsageError(f"--from {path}: this checkpoint does not exist")
    raise UsageError(
        f"--from {path}: neither a checkpoint of mcore-bundle (it has no {manifest.FILE_NAME}) nor a run"
        " with a checkpoint"
    )


def refuse_impossible_continuation(checkpoint: Path, step: int, recipe: Recipe) -> None:
    """Raise UsageError where a run cannot continue after that step of another run."""
    if recipe.task_traits.has_pairs:
        raise UsageError(
            f"--from {checkpoint}: a preference run uses its first weights as the reference, but this"
            " checkpoint is in the middle of another run. Load its weights only (--weights-only)"
        )
    if recipe.train.epochs is None and step >= recipe.train.steps:
        raise UsageError(
            f"{checkpoint} is of step {step}, so train.steps {recipe.train.steps} leaves nothing to train."
            " Raise train.steps, or start at step 0 with --weights-only"
        )


def _refuse_misfit(checkpoint: Path, recipe: Recipe, base: InitialWeights, *, weights_only: bool) -> None:
    """Raise UsageError where a rank would refuse a checkpoint because of its recorded facts."""
    try:
        saved = state.read(checkpoint)
    except ValueError as error:
        raise UsageError(f"--from {checkpoint}: this checkpoint cannot be used ({error})") from error
    state.refuse_another_model(checkpoint, saved, recipe, loaded=base.is_loaded)
    if not weights_only:
        state.refuse_another_optimizer(checkpoint, saved, recipe.optimizer)
        refuse_impossible_continuation(checkpoint, saved.state.step, recipe)


def _read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def _is_up_to_step(step: int, line: str) -> bool:
    """Return whether a line of the metrics stays: not a later step, and not an incomplete line."""
    try:
        noted = json.loads(line)
    except ValueError:
        return False
    at = noted.get("step") if isinstance(noted, dict) else None
    return not isinstance(at, int | float) or at <= step
