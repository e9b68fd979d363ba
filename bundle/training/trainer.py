"""A run on fixed data on one rank, once megatron may be imported: pretrain, sft and dpo."""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from bundle import data
from bundle.backends import Runtime
from bundle.data.cache import choose_cross_run_cache_directory
from bundle.data.loader import prepare_on_ranks
from bundle.distributed.watchdog import Watchdog
from bundle.distributed.world import run_on_rank_0
from bundle.launch.job import Job
from bundle.recipe import Recipe, with_epochs_as_steps
from bundle.runs.session_builder import SessionBuilder, train_in_locked_directory
from bundle.training import loop, reference
from bundle.training.loop import Batches, EarlyStopping
from bundle.training.preferences import PreferenceObjective

_log = logging.getLogger(__name__)


class Trainer:
    """A run on fixed data on this rank: `batches` of a `corpus`, and the `session` that learns from them."""

    def __init__(self, builder: SessionBuilder) -> None:
        """Read the data, build the model and load what the run, or its origin, has kept."""
        recipe, watchdog = builder.recipe, builder.watchdog
        cache_directory = choose_cross_run_cache_directory(recipe, builder.directory.root)
        self.corpus = prepare_on_ranks(recipe, cache_directory, watchdog)
        if _has_hf_tokenized_training_answers(recipe) and not self.corpus.end_tokens:
            _log.warning(
                "None of the first samples ends with an end-of-turn token, so the model will not learn to"
                " stop. Check the chat template"
            )
        samples = len(self.corpus.training)
        recipe = _with_epoch_steps(recipe, samples)
        loader = data.Loader(recipe, self.corpus, builder.groups.dp.rank, builder.groups.dp.size)
        self.batches = Batches(recipe, loader, builder.groups, builder.device)
        self.session = builder.build(
            samples,
            self.corpus.identity,
            objective=None if recipe.dpo is None else PreferenceObjective(recipe.dpo, builder.groups),
            end_tokens=self.corpus.end_tokens if _has_hf_tokenized_training_answers(recipe) else (),
        )
        self.early_stopping = EarlyStopping(
            recipe.train.early_stop, *self.session.task_state.get("early_stopping", ())
        )
        if recipe.task_traits.has_pairs:
            with watchdog.extend_patience("computing the reference"):
                self.batches.reference = self._compute_reference(builder)
        if not builder.is_resumed and (skipped := _count_corrupt_rows(self.corpus)):
            self.session.metrics.write(0, skipped)

    def train(self) -> None:
        """Train to the last step and write the result; raise what `loop.train` raises."""
        self.session.train_and_finalize(
            lambda: loop.train(self.session, self.batches, self.early_stopping), self._describe_result
        )

    def _compute_reference(self, builder: SessionBuilder) -> reference.Numbers:
        """Return the reference's log-probabilities."""
        recipe, directory = self.session.recipe, builder.directory
        initial = self.session.progress.step == 0 or recipe.model.lora is not None
        identity = run_on_rank_0(
            lambda: reference.ReferenceIdentity.from_run(
                recipe, self.corpus, builder.weights, directory.read_origin_digest(), initial=initial
            )
        )
        return reference.compute_log_probs(
            self.session.engine,
            self.batches,
            self.corpus.documents,
            directory.reference,
            identity,
            builder.watchdog,
        )

    def _describe_result(self) -> Mapping[str, Any]:
        """Log how the run ended, and return it as a mapping."""
        session, progress, corpus = self.session, self.session.progress, self.corpus
        losses, rule, early = progress.losses, self.early_stopping.rule, self.early_stopping.reason
        assert losses is not None, "the last step reports"
        depths = "".join(f", MTP {depth} {loss:.4f}" for depth, loss in enumerate(losses.mtp, start=1))
        skipped = progress.skipped_updates
        left_out = f"; {skipped} of {progress.step} updates were skipped" if skipped else ""
        entropy = corpus.conditional_byte_entropy_nats
        pairs = f"; the text's bigram entropy is {entropy:.2f}" if entropy is not None else ""
        if early:
            _log.info("stopping at step %d of %d: %s", progress.step, session.recipe.train.steps, early)
        unit = "a pair" if session.recipe.task_traits.has_pairs else "nats per token"
        _log.info("finished: loss %.4f%s %s%s%s", losses.main, depths, unit, left_out, pairs)
        return {
            "ended": early or "the last step",
            "early_stop": rule.dump() if rule and early else None,
            "skipped_rows": corpus.left_out.skipped,
            "skipped_validation_rows": {
                name: left_out_rows.skipped for name, left_out_rows in corpus.validation_left_out.items()
            },
            "loss": losses.main,
            "mtp_losses": list(losses.mtp),
        }


def run(job: Job, runtime: Runtime, device: torch.device, watchdog: Watchdog) -> None:
    """Train a job to its last step in its run directory; raise what `Trainer.train` raises."""
    train_in_locked_directory(job, runtime, device, watchdog, lambda builder: Trainer(builder).train())


def _with_epoch_steps(recipe: Recipe, samples: int) -> Recipe:
    """Return the recipe with steps for its epochs: all ranks have the same samples, and the same steps."""
    if (counted_recipe := with_epochs_as_steps(recipe, samples)) is not recipe:
        step_text = f"{counted_recipe.train.steps:,} steps of {counted_recipe.train.global_batch_size}"
        _log.info("%g epochs of %s samples are %s", recipe.train.epochs, f"{samples:,}", step_text)
    return counted_recipe


def _has_hf_tokenized_training_answers(recipe: Recipe) -> bool:
    """Return whether answers are learned in the model's own tokens."""
    return not recipe.task_traits.has_plain_text_rows and recipe.data.tokenizer.startswith("hf:")


def _count_corrupt_rows(corpus: data.Corpus) -> dict[str, float]:
    """Return how many rows were corrupt, as metrics, of each data set where there are any."""
    by_set = {
        f"data/skipped/{name}": left_out.skipped for name, left_out in corpus.validation_left_out.items()
    }
    return {
        name: count for name, count in {"data/skipped": corpus.left_out.skipped, **by_set}.items() if count
    }
