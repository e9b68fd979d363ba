"""Load the data of a rank: one rank of each node makes the tokens, each rank takes its share of a step."""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch.distributed as dist

from bundle.data import corpus
from bundle.data.corpus import Corpus, LeftOut
from bundle.data.samples import (
    BLANK_SAMPLE_NUMBER,
    Ints,
    SampleBatch,
    Samples,
    SampleSizes,
    draw_permutation,
    list_balanced_group_members,
)
from bundle.distributed import world
from bundle.distributed.watchdog import EXTENDED_PATIENCE_SECONDS, Watchdog
from bundle.distributed.world import find_disagreements, run_and_all_gather_results
from bundle.errors import EnvironmentUnfit
from bundle.recipe import Recipe

_log = logging.getLogger(__name__)

# A reader without a report for this long hangs: one document may be as large as a file.
READER_PATIENCE_SECONDS = EXTENDED_PATIENCE_SECONDS
# The time between two reports of a reader, and between two lines on the terminal.
REPORT_SECONDS, LINE_SECONDS = 1.0, 10.0
MAX_LOGGED_REASONS = 3  # reasons on the terminal, of each kind


class _ReaderRankReports:
    """The reports of the ranks that read, counted together in the store where ranks met."""

    def __init__(self, readers: int) -> None:
        self._store, self._readers = dist.PrefixStore("data", world.get_default_store()), readers

    def send_heartbeat(self) -> None:
        self._store.add("said", 1)

    def end(self, *, failed: bool) -> None:
        self._store.add("failed", int(failed))
        self._store.add("ended", 1)

    def count_progress_reports(self) -> int:
        return int(self._store.add("said", 0))

    def have_all_finished(self) -> bool:
        return int(self._store.add("ended", 0)) == self._readers

    def have_failed(self) -> bool:
        return int(self._store.add("failed", 0)) > 0


def prepare_on_ranks(recipe: Recipe, directory: Path, dog: Watchdog) -> Corpus:
    """Return the corpus, the same on every rank; its tokens lie under `directory`. Every rank must call it.

    Raise on every rank what `corpus.prepare` raises on one. Raise EnvironmentUnfit where ranks found
    different data.
    """
    is_reader = dog.local_rank == 0
    readers = _ReaderRankReports(sum(run_and_all_gather_results(lambda: is_reader)))
    corpora: list[Corpus] = []

    def prepare_rank() -> dict[str, str]:
        if is_reader:
            corpora.append(_read_corpus_as_reader(recipe, directory, dog, readers))
        _wait_for_readers(readers, dog)
        if not is_reader and not readers.have_failed():
            corpora.append(corpus.prepare(recipe, directory))
        return dict(corpora[0].identity) if corpora else {}

    _log.info("reading the data")
    with dog.extend_patience("reading the data", READER_PATIENCE_SECONDS):
        differences = find_disagreements(run_and_all_gather_results(prepare_rank))
    if differences:
        raise EnvironmentUnfit("the ranks have different data. Give every node the same files.", differences)
    (rank_corpus,) = corpora
    _log_left_out("the data", rank_corpus.left_out)
    for name, left_out in rank_corpus.validation_left_out.items():
        _log_left_out(f"data.validation_sets.{name}", left_out)
    return rank_corpus


def _read_corpus_as_reader(
    recipe: Recipe, directory: Path, dog: Watchdog, readers: _ReaderRankReports
) -> Corpus:
    def report_progress() -> None:
        dog.report_progress("reading the data")
        readers.send_heartbeat()

    failed = True
    try:
        rank_corpus = corpus.prepare(recipe, directory, build_progress_callback(report_progress))
        failed = False
    finally:
        readers.end(failed=failed)
    return rank_corpus


def _wait_for_readers(readers: _ReaderRankReports, dog: Watchdog) -> None:
    """Wait until every reader has ended; the readers' progress counts as progress of this rank."""
    seen, pause = 0, 0.05
    while not readers.have_all_finished():
        if (report_count := readers.count_progress_reports()) > seen:
            seen = report_count
            dog.report_progress("waiting for the rank that reads the data")
        time.sleep(pause)
        pause = min(REPORT_SECONDS, 2 * pause)


def build_progress_callback(notify_ranks: Callable[[], None] = lambda: None) -> Callable[[int], None]:
    """Return a function to call with the number of tokens read so far.

    It calls `notify_ranks` and writes a log line, each at its own interval.
    """
    notified_at, logged_at = time.monotonic(), time.monotonic()

    def report_progress(tokens: int) -> None:
        nonlocal notified_at, logged_at
        now = time.monotonic()
        if now - notified_at < REPORT_SECONDS:
            return
        notify_ranks()
        notified_at = now
        if now - logged_at >= LINE_SECONDS:
            _log.info("reading the data: %s tokens", f"{tokens:,}")
            logged_at = now

    return report_progress


def _log_left_out(data_set: str, left_out: LeftOut) -> None:
    """Log how many rows of a data set were left out, with the first reasons of each kind."""
    skipped, deleted, cut = left_out.skipped, left_out.deleted, left_out.cut
    corrupt = f"{data_set} has corrupt rows or files, which are skipped ({skipped:,})"
    long = f"{data_set} has rows that are too long ({deleted:,} deleted, {cut:,} cut)"
    for message, count, first in (
        (corrupt, skipped, left_out.skipped_rows),
        (long, deleted + cut, left_out.long_rows),
    ):
        more = ["and more; `check` lists all of them"] if len(first) > MAX_LOGGED_REASONS else []
        if count:
            _log.info("\n  - ".join([message, *first[:MAX_LOGGED_REASONS], *more]))


class Loader:
    """The micro-batches of one data-parallel rank; a global batch is the same for any number of ranks.

    The only state is how many samples were consumed.
    """

    def __init__(self, recipe: Recipe, corpus: Corpus, rank: int, dp: int) -> None:
        """Load for `rank` of `dp` data-parallel ranks; micro_batch_size x dp must divide the global batch."""
        self._recipe, self._corpus, self._rank, self._dp = recipe, corpus, rank, dp

    def read_training_step(self, consumed: int) -> list[SampleBatch]:
        """Return the micro-batches of the step that begins after `consumed` samples of the whole run."""
        return list(self._build_rank_micro_batches(self._corpus.training, self._draw_samples(consumed)))

    def compute_sizes(self, consumed: int) -> SampleSizes:
        """Return the sizes of that step's samples on all data-parallel ranks together."""
        return self._corpus.training.compute_sequence_sizes(self._draw_samples(consumed))

    def _draw_samples(self, consumed: int) -> Ints:
        return self._corpus.order.draw_samples(consumed, self._recipe.train.global_batch_size)

    def read_training_samples_once(self) -> Iterator[list[SampleBatch]]:
        """Yield the micro-batches of every training sample, one global batch at a time.

        The last global batch is filled up with BLANK_SAMPLE_NUMBER.
        """
        size, count = self._recipe.train.global_batch_size, len(self._corpus.training)
        numbers = np.concatenate([np.arange(count), np.full(-count % size, BLANK_SAMPLE_NUMBER)])
        for first in range(0, len(numbers), size):
            yield list(self._build_rank_micro_batches(self._corpus.training, numbers[first : first + size]))

    def read_validation(self) -> dict[str, list[SampleBatch]]:
        """Return the micro-batches of one evaluation by the name of its samples; they are the same each time.

        No sample comes twice. Every rank has as many micro-batches: blank samples without loss fill the rest.
        """
        return {
            name: self._draw_evaluation_batches(samples) for name, samples in self._corpus.validation.items()
        }

    def _draw_evaluation_batches(self, samples: Samples) -> list[SampleBatch]:
        train = self._recipe.train
        count = min(train.eval_batches * train.global_batch_size, len(samples))
        numbers = draw_permutation(len(samples), f"evaluation {self._recipe.seed}")[:count]
        blanks = np.full(-count % train.global_batch_size, BLANK_SAMPLE_NUMBER)
        return list(self._build_rank_micro_batches(samples, np.concatenate([numbers, blanks])))

    def _build_rank_micro_batches(self, samples: Samples, numbers: Ints) -> Iterator[SampleBatch]:
        """Yield the micro-batches of this rank in `numbers`, a whole number of global batches."""
        for global_batch in numbers.reshape(-1, self._recipe.train.global_batch_size):
            for portion in self._select_share(global_batch, samples.count_patches(global_batch)):
                yield samples.build_batch(portion)

    def _select_share(self, global_batch: Ints, patches: Ints) -> Ints:
        """Return this rank's part of a global batch: [micro-batches, samples of one].

        Where samples have unequal numbers of `patches`, they are balanced over micro-batches and then over
        ranks. All towers then have about as much to do. Micro-batches are the same for any number of ranks.
        """
        size = self._recipe.train.micro_batch_size_or_one
        micro_batches = np.arange(len(global_batch)).reshape(-1, size)
        shared = np.arange(len(micro_batches)).reshape(-1, self._dp).T
        if len(np.unique(patches)) > 1:
            micro_batches = list_balanced_group_members(patches, len(micro_batches))
            shared = list_balanced_group_members(patches[micro_batches].sum(1), self._dp)
        share: Ints = global_batch[micro_batches[shared[self._rank]]]
        return share
