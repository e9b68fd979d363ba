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
from bundle.data.cache import place
from bundle.data.loader import prepared
from bundle.distributed.watchdog import Watchdog, collectives_seconds
from bundle.distributed.world import StopRequest, on_all_ranks, on_rank_0
from bundle.engine import Engine, Losses
from bundle.environment import packages
from bundle.errors import JobFailed, Preempted, UsageError
from bundle.files import json_digest
from bundle.launch import events, outcomes
from bundle.launch.job import Job
from bundle.mcore import groups
from bundle.models import exporting
from bundle.pretrained import Pretrained
from bundle.recipe import Recipe, with_steps
from bundle.runs.directory import Origin, RunDirectory, refuse_middle
from bundle.runs.metrics import (
    JsonLines,
    Metrics,
    Profiler,
    Sink,
    Speed,
    TensorBoard,
    finite,
    terminal,
    trackers,
)
from bundle.runs.prometheus import Prometheus
from bundle.training import loop, reference
from bundle.training.loop import Batches, Progress
from bundle.training.preferences import Preferences
from bundle.training.unusual import Spikes, Stragglers

_log = logging.getLogger(__name__)


class Trainer:
    """One run on this rank: what is trained, fed, kept and reported. Every rank makes one; all act together.

    trained: the `engine`, on `groups`; fed: `batches` of a `corpus`; kept: `checkpoints` in `directory`, and
    the `progress` that training goes on from; reported: `metrics`. `dog` hears what takes long.
    """

    def __init__(self, job: Job, runtime: Runtime, device: torch.device, dog: Watchdog, *, goes_on: bool):
        """Reads the data, builds the model and loads what the run, or its origin, has kept."""
        recipe, self.directory, self.dog = job.recipe, RunDirectory(job.directory), dog
        with runtime.megatron():
            self.groups = groups.initialize(
                recipe.parallel,
                seed=recipe.seed,
                timeout_seconds=collectives_seconds(recipe.distributed.timeout_seconds),
            )
        self.corpus = prepared(recipe, place(recipe, self.directory.root), dog)
        if _answers(recipe) and not self.corpus.ends:
            _log.warning(
                "no answer of the first samples ends with a special token, as by a template that only opens"
                " turns: a model does not learn to stop from these"
            )
        recipe = self.recipe = _with_steps(recipe, self.corpus)
        feed = data.Loader(recipe, self.corpus, self.groups.dp.rank, self.groups.dp.size)
        self.batches = Batches(recipe, feed, self.groups, device)
        with dog.patience("loading the weights"):
            # A checkpoint of adapters holds no weights.
            whole = recipe.model.lora is None and self._has_checkpoint(goes_on=goes_on)
            weights = None if whole else agreed_weights(recipe)
            self.engine = Engine(
                with_steps(job.trained, len(self.corpus.training)),
                runtime,
                self.groups,
                device,
                weights,
                None if recipe.dpo is None else Preferences(recipe.dpo, self.groups),
            )
        self.checkpoints = Checkpoints(
            CheckpointDirectory(self.directory.checkpoints),
            self.engine,
            keep=recipe.checkpoint.keep,
            background=recipe.checkpoint.async_,
            beside=self._beside(weights),
            when_published=self._tell_checkpoint,
        )
        with dog.patience("loading a checkpoint"):
            self.progress = self._restored(goes_on=goes_on)
        if recipe.task == "dpo":
            with dog.patience("computing the reference"):
                self.batches.reference = self._reference(weights)
        on_rank_0(lambda: self.directory.rewind_metrics(self.progress.step))
        self.metrics, self.speed = self._metrics(), Speed(recipe, job.backend, device, dp=self.groups.dp.size)
        self.stragglers, self.spikes = Stragglers(self.groups.pp.rank, device), Spikes()
        if not goes_on and (skipped := _skipped(self.corpus)):
            self.metrics.write(0, skipped)

    def train(self, should_stop: Callable[[], bool]) -> None:
        """Trains to the last step and writes the result; raises what `loop.train` raises."""
        with self.metrics, Profiler(self.recipe, self.directory.profile, dist.get_rank()) as profiler:
            hooks = loop.Hooks(
                save=self._save,
                should_stop=should_stop,
                alive=self._alive,
                profiled=profiler.step,
                flops=lambda: self.speed.flops(*self.batches.sizes),
                gauges=self.speed.gauges,
                export=self._export,
                unusual=self._unusual,
                of_rank_0=lambda loss: on_rank_0(lambda: loss),
            )
            try:
                loop.train(self.engine, self.batches, self.progress, self.metrics, hooks)
            except Preempted:  # what is said to be written may be under way in the background
                self._complete()
                raise
            self._complete()
            self._export()
            on_rank_0(lambda: _conclude(self.recipe, self.directory, self.progress, self.corpus))

    def _unusual(self, at: Progress) -> Mapping[str, float]:
        assert at.losses is not None, "they are about to be reported"
        own = self.engine.pace.take()
        slow = {} if own is None else self.stragglers.look(at.step, own / at.unreported_steps)
        return {**slow, **self.spikes.look(at.step, at.losses.main)}

    def _save(self, at: Progress) -> None:
        with self.dog.patience(f"saving step {at.step}"):
            self.checkpoints.save(_state(at, self.engine, self.corpus.identity))

    def _tell_checkpoint(self, step: int) -> None:
        if events.has_listener():
            path = self.checkpoints.directory.place(step).absolute()
            events.write_event("checkpoint", step=step, directory=str(path))

    def _alive(self, step: int) -> None:
        self.dog.beat(f"step {step + 1}")
        self.checkpoints.poll()

    def _complete(self) -> None:
        with self.dog.patience("completing the last checkpoint"):
            self.checkpoints.poll(wait=True)

    def _export(self, step: int | None = None) -> None:
        """Writes what the recipe asks for, if anything; `step`: of one before the last, by its number."""
        kind = self.recipe.checkpoint.export
        if kind is None:
            return
        place = self.directory.exported(kind, step)
        self.engine.gather_weights()
        with self.dog.patience("exporting"), self.engine.runtime.megatron():
            if kind == "peft":
                exporting.export_adapters(place, self.recipe, self.engine.models)
            else:
                ends = self.corpus.ends if _answers(self.recipe) else ()
                exporting.export(place, self.recipe, self.engine.models, self.groups, ends)
        _log.info("exported to %s", place)

    def _metrics(self) -> Metrics:
        if dist.get_rank() != 0:
            return Metrics([])
        step = self.progress.step
        sinks: list[Sink] = [JsonLines(self.directory.metrics)]
        if self.recipe.metrics.tensorboard:
            sinks.append(TensorBoard(self.directory.tensorboard, step))
        if (asked := self.recipe.metrics.prometheus) is not None:
            name = self.directory.root.absolute().name
            sinks.append(Prometheus(asked, name, outcomes.launches_before()))
        sinks += trackers(self.recipe, self.directory)
        return Metrics([*sinks, terminal(self.recipe.train.steps, step)])

    def _has_checkpoint(self, *, goes_on: bool) -> bool:
        """Whether the weights come from one: this run's newest, or the one that it begins with."""
        kept = CheckpointDirectory(self.directory.checkpoints)
        return on_rank_0(lambda: bool(goes_on and kept.steps()) or self.directory.began_with() is not None)

    def _beside(self, weights: Pretrained | None) -> Mapping[str, str] | None:
        """Digests of the files that hold what adapters are trained beside; None where all is trained."""
        if self.recipe.model.lora is None:
            return None
        paths = weights.files if weights else []
        mine = paths[dist.get_rank() :: dist.get_world_size()]
        with self.dog.patience("reading what the adapters are beside"):
            shares = on_all_ranks(lambda: {path.name: manifest.digest(path) for path in mine})
        return {name: digest for share in shares for name, digest in share.items()}

    def _reference(self, weights: Pretrained | None) -> reference.Numbers:
        """The reference's log-probabilities; `weights` are what the engine was built with."""
        recipe, kept = self.recipe, self.directory.reference
        initial = self.progress.step == 0 or recipe.model.lora is not None
        identity = on_rank_0(
            lambda: reference.Identity.of(
                recipe, self.corpus, weights, self.directory.origin_digest(), initial=initial
            )
        )
        return reference.log_probs(self.engine, self.batches, self.corpus.documents, kept, identity, self.dog)

    def _restored(self, *, goes_on: bool) -> Progress:
        """Where training begins: after the newest usable checkpoint, or the start; says what is left out."""
        loaded = self.checkpoints.load_newest() if goes_on else None
        origin = None if loaded else on_rank_0(self.directory.began_with)
        if origin is not None:
            checkpoint = on_rank_0(self.directory.beginning_checkpoint)
            assert checkpoint is not None
            if origin.weights_only:
                self.checkpoints.load_weights(checkpoint)
                _log.info("begins with the weights of %s", checkpoint)
                return Progress()
            loaded = self.checkpoints.load_from(checkpoint)
            refuse_middle(checkpoint, loaded.state.step, self.recipe)
        if loaded is None:
            return Progress()
        saved = loaded.state
        if saved.data_digest != json_digest(self.corpus.identity):
            changes = data.changed(saved.metrics.get("data", {}), self.corpus.identity)
            raise UsageError(
                f"{loaded.directory.name} was trained on other data: put that back as it was, or begin"
                f" another run with these weights alone (--from {loaded.directory} --weights-only)",
                changes,
            )
        self.engine.restore_losses(saved.metrics["losses"])
        for note in loaded.notes:
            _log.info(note)
        _log.info("goes on after step %d", saved.step)
        progress = Progress(**saved.metrics["progress"])
        progress.losses = progress.losses and Losses(**saved.metrics["progress"]["losses"])
        return progress


def agreed_weights(recipe: Recipe) -> Pretrained | None:
    """What the model begins with, the same on every rank; says it.

    Raises UsageError where it cannot be loaded, or is not what another rank has found.
    """
    found: list[Pretrained | None] = []

    def look() -> str:
        found.append(pretrained.of_recipe(recipe))
        return str(found[0] or "random weights")

    seen = on_all_ranks(look)
    if len(set(seen)) > 1:
        raise UsageError(
            f"model.path {recipe.model.path}: ranks find different weights",
            [f"rank {seen.index(what)}: {what}" for what in dict.fromkeys(seen)],
        )
    if recipe.model.path is not None:
        _log.info("begins with %s", pretrained.described(recipe, found[0]))
    return found[0]


def run(job: Job, runtime: Runtime, device: torch.device, dog: Watchdog) -> None:
    """Trains a job to its last step in its run directory; raises what `Trainer.train` raises."""
    directory = RunDirectory(job.directory)
    with ExitStack() as held:
        stop = StopRequest(device)
        on_rank_0(lambda: held.enter_context(directory.locked()))
        goes_on = on_rank_0(lambda: _begin(job, directory))
        if goes_on is not None:
            Trainer(job, runtime, device, dog, goes_on=goes_on).train(stop.agreed)


def _with_steps(recipe: Recipe, corpus: data.Corpus) -> Recipe:
    """The recipe with steps for its epochs: all ranks have the same samples, and come to the same."""
    count = len(corpus.training)
    if (counted := with_steps(recipe, count)) is not recipe:
        made = f"{counted.train.steps:,} steps of {counted.train.global_batch_size}"
        _log.info("%g epochs of %s samples are %s", recipe.train.epochs, f"{count:,}", made)
    return counted


def _begin(job: Job, directory: RunDirectory) -> bool | None:
    """Returns whether there is a run to go on with, None where nothing is left to do; writes its start."""
    recipe, origin = job.recipe, Origin.of(job.start)
    versions = {p.name: {"version": p.version, "commit": p.commit} for p in packages.detect().packages()}
    goes_on = directory.begin(recipe, job.start)
    if not goes_on:
        if job.start.fresh:
            directory.reference.unlink(missing_ok=True)
        directory.write_start(recipe, job.dump(), versions, origin)
    elif directory.finished(recipe):
        _log.info(directory.nothing_left())
        return None
    else:
        directory.write_again(recipe, job.dump(), versions)
    return goes_on


def _answers(recipe: Recipe) -> bool:
    """Whether answers are learned in the model's own tokens."""
    return recipe.task != "pretrain" and recipe.data.tokenizer.startswith("hf:")


def _state(at: Progress, engine: Engine, identity: Mapping[str, str]) -> TrainState:
    carried = {"progress": asdict(at), "losses": engine.losses_so_far(), "data": dict(identity)}
    return TrainState(at.step, at.consumed_samples, json_digest(identity), carried)


def _skipped(corpus: data.Corpus) -> dict[str, float]:
    """How many rows were corrupt, as metrics, of each data set where there are any."""
    named = {f"data/skipped/{name}": of.skipped for name, of in corpus.validation_left_out.items()}
    return {
        name: count for name, count in {"data/skipped": corpus.left_out.skipped, **named}.items() if count
    }


def _conclude(recipe: Recipe, directory: RunDirectory, progress: Progress, corpus: data.Corpus) -> None:
    """Writes the result, which makes the run a finished one, and says it.

    Raises JobFailed for a run that learned nothing.
    """
    losses, skipped, rule = progress.losses, progress.skipped_updates, recipe.train.early_stop
    early = progress.early_end(rule)
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
        "skipped_validation_rows": {name: of.skipped for name, of in corpus.validation_left_out.items()},
        "loss": losses.main,
        "mtp_losses": list(losses.mtp),
    }
    files.write_json(directory.result, finite(result))
