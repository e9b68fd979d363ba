"""Builds the session of a run: the model with its first weights, then the newest checkpoint, if any."""

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack

import torch
import torch.distributed as dist

from bundle import pretrained
from bundle.backends import Runtime
from bundle.checkpoints import state
from bundle.checkpoints.base_digests import BackgroundDigests
from bundle.checkpoints.checkpoints import Checkpoints, LoadedCheckpoint
from bundle.checkpoints.directory import CheckpointDirectory
from bundle.distributed.watchdog import Watchdog, compute_collective_timeout
from bundle.distributed.world import StopRequest, run_and_all_gather_results, run_on_rank_0
from bundle.engine import Engine, Objective
from bundle.environment import packages
from bundle.errors import EnvironmentUnfit, UsageError
from bundle.files import compute_short_json_digest
from bundle.launch import events, outcomes
from bundle.launch.job import Job
from bundle.mcore import groups
from bundle.pretrained import PretrainedWeights
from bundle.recipe import Recipe, with_epochs_as_steps
from bundle.runs.directory import Origin, RunDirectory, refuse_impossible_continuation
from bundle.runs.metrics import (
    JsonLines,
    MetricsDispatcher,
    Profiler,
    Sink,
    Speed,
    TensorBoard,
    build_terminal_sink,
    start_trackers,
)
from bundle.runs.progress import Progress
from bundle.runs.prometheus import PrometheusSink
from bundle.runs.session import Session
from bundle.runs.stragglers import Stragglers

_log = logging.getLogger(__name__)


class SessionBuilder:
    """Holds the job, the process groups and the run directory, and builds the session of the task.

    After `build`, `weights` are the published weights that the model began with. They are None where it began
    with random ones, or with those of a checkpoint.
    """

    def __init__(
        self,
        job: Job,
        runtime: Runtime,
        device: torch.device,
        watchdog: Watchdog,
        *,
        is_resumed: bool,
        stop_request: StopRequest,
    ) -> None:
        """Make the process groups; all ranks call it."""
        self.job, self.runtime, self.device, self.watchdog = job, runtime, device, watchdog
        self.is_resumed, self.stop_request = is_resumed, stop_request
        self.recipe, self.directory = job.recipe, RunDirectory(job.directory)
        self.weights: PretrainedWeights | None = None
        with runtime.megatron_calls():
            self.groups = groups.create_model_parallel_groups(
                job.recipe.parallel,
                seed=job.recipe.seed,
                timeout_seconds=compute_collective_timeout(job.recipe.distributed.timeout_seconds),
            )

    def build(
        self,
        samples: int,
        identity: Mapping[str, str],
        *,
        objective: Objective | None = None,
        end_tokens: Collection[int] = (),
        keep_reference: Callable[[Engine], None] | None = None,
    ) -> Session:
        """Return the session, with the weights and the progress of the newest checkpoint, if any.

        `samples` is the size of an epoch. `identity` holds digests of the data by name. `objective` replaces
        the main loss. `keep_reference` gets the engine while it has the weights that the run began with,
        before a checkpoint of the run is loaded. All ranks call it. Raise UsageError for a checkpoint of a
        run on other data.
        """
        recipe = with_epochs_as_steps(self.recipe, samples)
        _log.info("building the model")
        with self.watchdog.extend_patience("loading the weights"):
            self.weights = self._find_weights_missing_in_checkpoint(needs_first=keep_reference is not None)
            engine = Engine(
                with_epochs_as_steps(self.job.recipe_with_planned_attention, samples),
                self.runtime,
                self.groups,
                self.device,
                self.weights,
                objective,
            )
        checkpoints = Checkpoints(
            CheckpointDirectory(self.directory.checkpoints),
            engine,
            keep=recipe.checkpoint.keep,
            background=recipe.checkpoint.async_,
            base_digests=self._start_base_digests(),
            on_published=self._print_checkpoint_event,
        )
        with self.watchdog.extend_patience("loading a checkpoint"):
            progress, task_state = self._restore(engine, checkpoints, recipe, identity, keep_reference)
        run_on_rank_0(lambda: self.directory.rewind_metrics(progress.step))
        return Session(
            recipe=recipe,
            engine=engine,
            directory=self.directory,
            checkpoints=checkpoints,
            watchdog=self.watchdog,
            metrics=self._build_metrics(recipe, progress.step),
            speed=Speed(recipe, self.job.backend, self.device, dp=self.groups.dp.size),
            stragglers=Stragglers(self.groups.pp.rank, self.device),
            profiler=Profiler(recipe, self.directory.profile, dist.get_rank()),
            stop_request=self.stop_request,
            progress=progress,
            identity=identity,
            task_state=task_state,
            end_tokens=end_tokens,
        )

    def _find_weights_missing_in_checkpoint(self, *, needs_first: bool) -> PretrainedWeights | None:
        """Return the published weights that the model begins with; None where a checkpoint has them all."""
        # A checkpoint of adapters holds no weights.
        if self.recipe.model.lora is not None or not self._is_initialized_from_checkpoint(
            needs_first=needs_first
        ):
            return find_weights_on_all_ranks(self.recipe)
        return None

    def _is_initialized_from_checkpoint(self, *, needs_first: bool) -> bool:
        """Return whether the first weights come from a checkpoint: this run's newest, or its origin."""
        checkpoints = CheckpointDirectory(self.directory.checkpoints)
        return run_on_rank_0(
            lambda: (
                bool(not needs_first and self.is_resumed and checkpoints.list_steps_newest_first())
                or self.directory.read_origin() is not None
            )
        )

    def _start_base_digests(self) -> BackgroundDigests | None:
        """Start to compute digests of the files of the base weights; None without adapters."""
        if self.recipe.model.lora is None:
            return None
        return BackgroundDigests(self.weights.files if self.weights else [])

    def _restore(
        self,
        engine: Engine,
        checkpoints: Checkpoints,
        recipe: Recipe,
        identity: Mapping[str, str],
        keep_reference: Callable[[Engine], None] | None,
    ) -> tuple[Progress, dict[str, object]]:
        """Load a checkpoint, if there is one; return the progress and the task state to begin with."""
        origin = run_on_rank_0(self.directory.read_origin)
        if keep_reference is not None:
            if origin is not None:
                self._restore_origin_or_load_weights(checkpoints, recipe, weights_only=True)
            keep_reference(engine)
        loaded = checkpoints.load_newest() if self.is_resumed else None
        if loaded is None and origin is not None:
            loaded = self._restore_origin_or_load_weights(
                checkpoints, recipe, weights_only=origin.weights_only
            )
        if loaded is None:
            return Progress(), {}
        saved = loaded.state
        if saved.data_digest != compute_short_json_digest(identity):
            raise UsageError(
                f"{loaded.directory.name} was trained on other data. Restore that data, or start another"
                f" run from these weights (--from {loaded.directory} --weights-only)",
                state.list_data_changes(saved.metrics.get("data", {}), identity),
            )
        engine.restore_loss_sums(saved.metrics["losses"])
        for note in loaded.notes:
            _log.info(note)
        _log.info("continues after step %d", saved.step)
        return Progress.from_dump(saved.metrics["progress"]), dict(saved.metrics["task"])

    def _restore_origin_or_load_weights(
        self, checkpoints: Checkpoints, recipe: Recipe, *, weights_only: bool
    ) -> LoadedCheckpoint | None:
        """Load the checkpoint that `--from` names; return it, or None where only its weights are loaded."""
        checkpoint = run_on_rank_0(self.directory.find_origin_checkpoint)
        assert checkpoint is not None
        if weights_only:
            checkpoints.load_weights(checkpoint)
            _log.info("starts from the weights of %s", checkpoint)
            return None
        loaded = checkpoints.load_from(checkpoint)
        refuse_impossible_continuation(checkpoint, loaded.state.step, recipe)
        return loaded

    def _print_checkpoint_event(self, step: int) -> None:
        if events.has_listener():
            path = CheckpointDirectory(self.directory.checkpoints).get_path(step).absolute()
            events.print_event("checkpoint", step=step, directory=str(path))

    def _build_metrics(self, recipe: Recipe, step: int) -> MetricsDispatcher:
        if dist.get_rank() != 0:
            return MetricsDispatcher([])
        sinks: list[Sink] = [JsonLines(self.directory.metrics)]
        if recipe.metrics.tensorboard:
            sinks.append(TensorBoard(self.directory.tensorboard, step))
        if (prometheus := recipe.metrics.prometheus) is not None:
            name = self.directory.root.absolute().name
            try:
                sinks.append(PrometheusSink(prometheus, name, outcomes.count_earlier_node_launches()))
            except EnvironmentUnfit as error:  # a port that another program has taken ends no training
                _log.warning("%s. The run continues without the endpoint.", error)
        sinks += start_trackers(recipe, self.directory)
        return MetricsDispatcher([*sinks, build_terminal_sink(recipe.train.steps, step)])


def find_weights_on_all_ranks(recipe: Recipe) -> PretrainedWeights | None:
    """Return the weights of model.path, or None for random ones, and log which; all ranks call it.

    Raise UsageError where they cannot be loaded, or where ranks find different ones.
    """
    weights: list[PretrainedWeights | None] = []

    def find_weights() -> str:
        weights.append(pretrained.find_recipe_weights(recipe))
        return str(weights[0] or "random weights")

    descriptions = run_and_all_gather_results(find_weights)
    if len(set(descriptions)) > 1:
        raise UsageError(
            f"model.path: ranks find different weights ({recipe.model.path}). Give all nodes the same files.",
            [
                f"rank {descriptions.index(description)}: {description}"
                for description in dict.fromkeys(descriptions)
            ],
        )
    if recipe.model.path is not None:
        _log.info("starts from %s", pretrained.describe_weights(recipe, weights[0]))
    return weights[0]


def train_in_locked_directory(
    job: Job,
    runtime: Runtime,
    device: torch.device,
    watchdog: Watchdog,
    train: Callable[[SessionBuilder], None],
) -> None:
    """Call `train` while the run directory is locked, unless the run is finished; raise what it raises."""
    directory = RunDirectory(job.directory)
    with ExitStack() as exit_stack:
        stop_request = StopRequest(device)
        has_launcher = outcomes.get_launch_folder() is not None
        run_on_rank_0(lambda: exit_stack.enter_context(directory.hold_lock(joins_launcher=has_launcher)))
        is_resumed = run_on_rank_0(lambda: _prepare_run_directory(job, directory))
        if is_resumed is not None:
            train(
                SessionBuilder(
                    job,
                    runtime,
                    device,
                    watchdog,
                    is_resumed=is_resumed,
                    stop_request=stop_request,
                )
            )


def _prepare_run_directory(job: Job, directory: RunDirectory) -> bool | None:
    """Write the start or the resume of a run; return whether it is a resume, None for a finished run."""
    recipe, origin = job.recipe, Origin.from_start(job.start)
    versions = {
        p.name: {"version": p.version, "commit": p.commit} for p in packages.detect().list_tracked_packages()
    }
    is_resumed = directory.decide_resume(recipe, job.start)
    if not is_resumed:
        if job.start.fresh:
            directory.reference.unlink(missing_ok=True)
            for answers in directory.rollouts.glob("step-*.jsonl"):
                answers.unlink()
        directory.remove_results_and_write_start(recipe, job.dump(), versions, origin)
    elif directory.has_required_results(recipe):
        _log.info(directory.format_finished_run_advice())
        return None
    else:
        directory.write_resume(recipe, job.dump(), versions)
    return is_resumed
