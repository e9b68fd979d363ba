"""A training run on one rank, once megatron may be imported: groups, data, engine, checkpoints, loop."""

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict

import torch
import torch.distributed as dist

from bundle import data, files, pretrained
from bundle.backends import Runtime
from bundle.checkpoints import manifest
from bundle.checkpoints.checkpoints import Checkpoints
from bundle.checkpoints.directory import CheckpointDirectory
from bundle.checkpoints.state import TrainState
from bundle.data.cache import choose_cache_directory
from bundle.data.loader import prepare_on_ranks
from bundle.distributed.watchdog import Watchdog, compute_collective_seconds
from bundle.distributed.world import StopRequest, run_on_all_ranks, run_on_rank_0
from bundle.engine import Engine, Losses
from bundle.environment import packages
from bundle.errors import JobFailed, Preempted, UsageError
from bundle.files import digest_json
from bundle.launch import events, outcomes
from bundle.launch.job import Job
from bundle.mcore import groups
from bundle.models import exporting
from bundle.pretrained import PretrainedWeights
from bundle.recipe import Recipe, with_steps
from bundle.runs.directory import Origin, RunDirectory, refuse_mid_run
from bundle.runs.metrics import (
    JsonLines,
    MetricsWriter,
    Profiler,
    Sink,
    Speed,
    TensorBoard,
    build_terminal_sink,
    replace_nonfinite,
    start_trackers,
)
from bundle.runs.prometheus import PrometheusSink
from bundle.training import loop, reference
from bundle.training.anomalies import LossSpikes, Stragglers
from bundle.training.loop import Batches, Progress
from bundle.training.preferences import PreferenceObjective

_log = logging.getLogger(__name__)


class Trainer:
    """One run on this rank: what is trained, fed, kept and reported. Every rank makes one; all act together.

    trained: the `engine`, on `groups`; fed: `batches` of a `corpus`; kept: `checkpoints` in `directory`, and
    the `progress` that training goes on from; reported: `metrics`. `dog` hears what takes long.
    """

    def __init__(self, job: Job, runtime: Runtime, device: torch.device, dog: Watchdog, *, goes_on: bool):
        """Reads the data, builds the model and loads what the run, or its origin, has kept."""
        recipe, self.directory, self.dog = job.recipe, RunDirectory(job.directory), dog
        with runtime.megatron_calls():
            self.groups = groups.initialize(
                recipe.parallel,
                seed=recipe.seed,
                timeout_seconds=compute_collective_seconds(recipe.distributed.timeout_seconds),
            )
        self.corpus = prepare_on_ranks(recipe, choose_cache_directory(recipe, self.directory.root), dog)
        if _has_answer_tokens(recipe) and not self.corpus.end_tokens:
            _log.warning(
                "no answer of the first samples ends with a special token, as by a template that only opens"
                " turns: a model does not learn to stop from these"
            )
        recipe = self.recipe = _with_steps(recipe, self.corpus)
        loader = data.Loader(recipe, self.corpus, self.groups.dp.rank, self.groups.dp.size)
        self.batches = Batches(recipe, loader, self.groups, device)
        with dog.extend_patience("loading the weights"):
            # A checkpoint of adapters holds no weights.
            has_all_weights = recipe.model.lora is None and self._has_checkpoint(goes_on=goes_on)
            weights = None if has_all_weights else agree_on_weights(recipe)
            self.engine = Engine(
                with_steps(job.trained_recipe, len(self.corpus.training)),
                runtime,
                self.groups,
                device,
                weights,
                None if recipe.dpo is None else PreferenceObjective(recipe.dpo, self.groups),
            )
        self.checkpoints = Checkpoints(
            CheckpointDirectory(self.directory.checkpoints),
            self.engine,
            keep=recipe.checkpoint.keep,
            background=recipe.checkpoint.async_,
            base_digests=self._digest_base_weights(weights),
            on_published=self._write_checkpoint_event,
        )
        with dog.extend_patience("loading a checkpoint"):
            self.progress = self._restore_progress(goes_on=goes_on)
        if recipe.task == "dpo":
            with dog.extend_patience("computing the reference"):
                self.batches.reference = self._compute_reference(weights)
        run_on_rank_0(lambda: self.directory.rewind_metrics(self.progress.step))
        self.metrics, self.speed = (
            self._build_metrics(),
            Speed(recipe, job.backend, device, dp=self.groups.dp.size),
        )
        self.stragglers, self.spikes = Stragglers(self.groups.pp.rank, device), LossSpikes()
        if not goes_on and (skipped := _count_skipped(self.corpus)):
            self.metrics.write(0, skipped)

    def train(self, should_stop: Callable[[], bool]) -> None:
        """Trains to the last step and writes the result; raises what `loop.train` raises."""
        with self.metrics, Profiler(self.recipe, self.directory.profile, dist.get_rank()) as profiler:
            hooks = loop.Hooks(
                save=self._save,
                should_stop=should_stop,
                send_heartbeat=self._send_heartbeat,
                profile_step=profiler.step,
                count_flops=lambda: self.speed.compute_flops(*self.batches.sizes),
                compute_gauges=self.speed.compute_gauges,
                export=self._export,
                measure_anomalies=self._measure_anomalies,
                broadcast_from_rank_0=lambda loss: run_on_rank_0(lambda: loss),
            )
            try:
                loop.train(self.engine, self.batches, self.progress, self.metrics, hooks)
            except Preempted:  # what is said to be written may be under way in the background
                self._complete_checkpoint()
                raise
            self._complete_checkpoint()
            self._export()
            run_on_rank_0(lambda: _write_result(self.recipe, self.directory, self.progress, self.corpus))

    def _measure_anomalies(self, progress: Progress) -> Mapping[str, float]:
        assert progress.losses is not None, "they are about to be reported"
        own_seconds = self.engine.forward_timer.take_seconds()
        slow = (
            {}
            if own_seconds is None
            else self.stragglers.measure(progress.step, own_seconds / progress.unreported_steps)
        )
        return {**slow, **self.spikes.measure(progress.step, progress.losses.main)}

    def _save(self, progress: Progress) -> None:
        with self.dog.extend_patience(f"saving step {progress.step}"):
            self.checkpoints.save(_build_state(progress, self.engine, self.corpus.identity))

    def _write_checkpoint_event(self, step: int) -> None:
        if events.has_listener():
            path = self.checkpoints.directory.get_path(step).absolute()
            events.write_event("checkpoint", step=step, directory=str(path))

    def _send_heartbeat(self, step: int) -> None:
        self.dog.report_progress(f"step {step + 1}")
        self.checkpoints.poll()

    def _complete_checkpoint(self) -> None:
        with self.dog.extend_patience("completing the last checkpoint"):
            self.checkpoints.poll(wait=True)

    def _export(self, step: int | None = None) -> None:
        """Writes what the recipe asks for, if anything; `step`: of one before the last, by its number."""
        kind = self.recipe.checkpoint.export
        if kind is None:
            return
        directory = self.directory.build_export_path(kind, step)
        self.engine.gather_weights()
        with self.dog.extend_patience("exporting"), self.engine.runtime.megatron_calls():
            if kind == "peft":
                exporting.export_adapters(directory, self.recipe, self.engine.models)
            else:
                ends = self.corpus.end_tokens if _has_answer_tokens(self.recipe) else ()
                exporting.export(directory, self.recipe, self.engine.models, self.groups, ends)
        _log.info("exported to %s", directory)

    def _build_metrics(self) -> MetricsWriter:
        if dist.get_rank() != 0:
            return MetricsWriter([])
        step = self.progress.step
        sinks: list[Sink] = [JsonLines(self.directory.metrics)]
        if self.recipe.metrics.tensorboard:
            sinks.append(TensorBoard(self.directory.tensorboard, step))
        if (prometheus := self.recipe.metrics.prometheus) is not None:
            name = self.directory.root.absolute().name
            sinks.append(PrometheusSink(prometheus, name, outcomes.count_earlier_launches()))
        sinks += start_trackers(self.recipe, self.directory)
        return MetricsWriter([*sinks, build_terminal_sink(self.recipe.train.steps, step)])

    def _has_checkpoint(self, *, goes_on: bool) -> bool:
        """Whether the weights come from one: this run's newest, or the one that it begins with."""
        checkpoints = CheckpointDirectory(self.directory.checkpoints)
        return run_on_rank_0(
            lambda: bool(goes_on and checkpoints.list_steps()) or self.directory.read_origin() is not None
        )

    def _digest_base_weights(self, weights: PretrainedWeights | None) -> Mapping[str, str] | None:
        """Digests of the files that hold what adapters are trained beside; None where all is trained."""
        if self.recipe.model.lora is None:
            return None
        paths = weights.files if weights else []
        own_paths = paths[dist.get_rank() :: dist.get_world_size()]
        with self.dog.extend_patience("reading what the adapters are beside"):
            shares = run_on_all_ranks(
                lambda: {path.name: manifest.compute_digest(path) for path in own_paths}
            )
        return {name: digest for share in shares for name, digest in share.items()}

    def _compute_reference(self, weights: PretrainedWeights | None) -> reference.Numbers:
        """The reference's log-probabilities; `weights` are what the engine was built with."""
        recipe, cache_file = self.recipe, self.directory.reference
        initial = self.progress.step == 0 or recipe.model.lora is not None
        identity = run_on_rank_0(
            lambda: reference.ReferenceIdentity.from_run(
                recipe, self.corpus, weights, self.directory.read_origin_digest(), initial=initial
            )
        )
        return reference.compute_log_probs(
            self.engine, self.batches, self.corpus.documents, cache_file, identity, self.dog
        )

    def _restore_progress(self, *, goes_on: bool) -> Progress:
        """Where training begins: after the newest usable checkpoint, or the start; says what is left out."""
        loaded = self.checkpoints.load_newest() if goes_on else None
        origin = None if loaded else run_on_rank_0(self.directory.read_origin)
        if origin is not None:
            checkpoint = run_on_rank_0(self.directory.find_initial_checkpoint)
            assert checkpoint is not None
            if origin.weights_only:
                self.checkpoints.load_weights(checkpoint)
                _log.info("begins with the weights of %s", checkpoint)
                return Progress()
            loaded = self.checkpoints.load_from(checkpoint)
            refuse_mid_run(checkpoint, loaded.state.step, self.recipe)
        if loaded is None:
            return Progress()
        saved = loaded.state
        if saved.data_digest != digest_json(self.corpus.identity):
            changes = data.list_changes(saved.metrics.get("data", {}), self.corpus.identity)
            raise UsageError(
                f"{loaded.directory.name} was trained on other data: put that back as it was, or begin"
                f" another run with these weights alone (--from {loaded.directory} --weights-only)",
                changes,
            )
        self.engine.restore_loss_sums(saved.metrics["losses"])
        for note in loaded.notes:
            _log.info(note)
        _log.info("goes on after step %d", saved.step)
        progress = Progress(**saved.metrics["progress"])
        progress.losses = progress.losses and Losses(**saved.metrics["progress"]["losses"])
        return progress


def agree_on_weights(recipe: Recipe) -> PretrainedWeights | None:
    """What the model begins with, the same on every rank; says it.

    Raises UsageError where it cannot be loaded, or is not what another rank has found.
    """
    weights: list[PretrainedWeights | None] = []

    def find_weights() -> str:
        weights.append(pretrained.find_recipe_weights(recipe))
        return str(weights[0] or "random weights")

    descriptions = run_on_all_ranks(find_weights)
    if len(set(descriptions)) > 1:
        raise UsageError(
            f"model.path {recipe.model.path}: ranks find different weights",
            [
                f"rank {descriptions.index(description)}: {description}"
                for description in dict.fromkeys(descriptions)
            ],
        )
    if recipe.model.path is not None:
        _log.info("begins with %s", pretrained.describe_weights(recipe, weights[0]))
    return weights[0]


def run(job: Job, runtime: Runtime, device: torch.device, dog: Watchdog) -> None:
    """Trains a job to its last step in its run directory; raises what `Trainer.train` raises."""
    directory = RunDirectory(job.directory)
    with ExitStack() as exit_stack:
        stop = StopRequest(device)
        run_on_rank_0(lambda: exit_stack.enter_context(directory.hold_lock()))
        goes_on = run_on_rank_0(lambda: _begin(job, directory))
        if goes_on is not None:
            Trainer(job, runtime, device, dog, goes_on=goes_on).train(stop.agree_to_stop)


def _with_steps(recipe: Recipe, corpus: data.Corpus) -> Recipe:
    """The recipe with steps for its epochs: all ranks have the same samples, and come to the same."""
    count = len(corpus.training)
    if (counted_recipe := with_steps(recipe, count)) is not recipe:
        step_text = f"{counted_recipe.train.steps:,} steps of {counted_recipe.train.global_batch_size}"
        _log.info("%g epochs of %s samples are %s", recipe.train.epochs, f"{count:,}", step_text)
    return counted_recipe


def _begin(job: Job, directory: RunDirectory) -> bool | None:
    """Returns whether there is a run to go on with, None where nothing is left to do; writes its start."""
    recipe, origin = job.recipe, Origin.from_start(job.start)
    versions = {p.name: {"version": p.version, "commit": p.commit} for p in packages.detect().list_packages()}
    goes_on = directory.check_start(recipe, job.start)
    if not goes_on:
        if job.start.fresh:
            directory.reference.unlink(missing_ok=True)
        directory.write_start(recipe, job.dump(), versions, origin)
    elif directory.is_finished(recipe):
        _log.info(directory.describe_finished())
        return None
    else:
        directory.write_resume(recipe, job.dump(), versions)
    return goes_on


def _has_answer_tokens(recipe: Recipe) -> bool:
    """Whether answers are learned in the model's own tokens."""
    return recipe.task != "pretrain" and recipe.data.tokenizer.startswith("hf:")


def _build_state(progress: Progress, engine: Engine, identity: Mapping[str, str]) -> TrainState:
    carried = {"progress": asdict(progress), "losses": engine.gather_loss_sums(), "data": dict(identity)}
    return TrainState(progress.step, progress.consumed_samples, digest_json(identity), carried)


def _count_skipped(corpus: data.Corpus) -> dict[str, float]:
    """How many rows were corrupt, as metrics, of each data set where there are any."""
    by_set = {
        f"data/skipped/{name}": left_out.skipped for name, left_out in corpus.validation_left_out.items()
    }
    return {
        name: count for name, count in {"data/skipped": corpus.left_out.skipped, **by_set}.items() if count
    }


def _write_result(recipe: Recipe, directory: RunDirectory, progress: Progress, corpus: data.Corpus) -> None:
    """Writes the result, which makes the run a finished one, and says it.

    Raises JobFailed for a run that learned nothing.
    """
    losses, skipped, rule = progress.losses, progress.skipped_updates, recipe.train.early_stop
    early = progress.find_early_end(rule)
    assert losses is not None, "the last step reports"
    if skipped == progress.step:
        raise JobFailed(
            f"not one of {skipped} updates was made, since no gradient was finite: the weights are those of"
            " the start. Lower optimizer.lr or look at the data"
        )
    depths = "".join(f", MTP {depth} {loss:.4f}" for depth, loss in enumerate(losses.mtp, start=1))
    left_out = f"; {skipped} of {progress.step} updates were skipped" if skipped else ""
    entropy = corpus.bigram_entropy
    pairs = f"; the text's bigram entropy is {entropy:.2f}" if entropy is not None else ""
    if early:
        _log.info("ends at step %d of %d by %s", progress.step, recipe.train.steps, early)
    unit = "a pair" if recipe.task == "dpo" else "nats per token"
    _log.info("finished: loss %.4f%s %s%s%s", losses.main, depths, unit, left_out, pairs)
    result = {
        "step": progress.step,
        "ended": early or "the last step",
        "early_stop": rule.dump() if rule and early else None,
        "skipped_updates": skipped,
        "skipped_rows": corpus.left_out.skipped,
        "skipped_validation_rows": {
            name: left_out_rows.skipped for name, left_out_rows in corpus.validation_left_out.items()
        },
        "loss": losses.main,
        "mtp_losses": list(losses.mtp),
    }
    files.write_json(directory.result, replace_nonfinite(result))
