"""What a rank is fed: the corpus, made into tokens by one rank of each node, and its share of each step."""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch.distributed as dist

from bundle.data import corpus
from bundle.data.corpus import Corpus, LeftOut
from bundle.data.samples import BLANK, Batch, Ints, Samples, Sizes, dealt, permutation
from bundle.distributed import world
from bundle.distributed.watchdog import PATIENCE_SECONDS, Watchdog
from bundle.distributed.world import disagreements, on_all_ranks
from bundle.errors import EnvironmentUnfit
from bundle.recipe import Recipe

_log = logging.getLogger(__name__)

# A reader that says nothing for so long hangs: one document may be as large as a file.
PATIENCE = PATIENCE_SECONDS
# Between two words of a reader; and between two lines on the terminal.
SECONDS, LINE_SECONDS = 1.0, 10.0
SHOWN = 3  # reasons on the terminal, of each kind


class _Readers:
    """What the ranks that read have told the others: they count together, in the store where ranks met."""

    def __init__(self, readers: int) -> None:
        self._store, self._readers = dist.PrefixStore("data", world.store()), readers

    def go_on(self) -> None:
        self._store.add("said", 1)

    def end(self, *, failed: bool) -> None:
        self._store.add("failed", int(failed))
        self._store.add("ended", 1)

    def said(self) -> int:
        return int(self._store.add("said", 0))

    def have_ended(self) -> bool:
        return int(self._store.add("ended", 0)) == self._readers

    def have_failed(self) -> bool:
        return int(self._store.add("failed", 0)) > 0


def prepared(recipe: Recipe, directory: Path, dog: Watchdog) -> Corpus:
    """The corpus, the same on every rank; its tokens lie under `directory`. Every rank must call it.

    Raises on every rank what `corpus.prepare` raises on one, and EnvironmentUnfit when ranks found different
    data.
    """
    reads = dog.local_rank == 0
    readers = _Readers(sum(on_all_ranks(lambda: reads)))
    corpora: list[Corpus] = []

    def body() -> dict[str, str]:
        if reads:
            corpora.append(_read(recipe, directory, dog, readers))
        _wait(readers, dog)
        if not reads and not readers.have_failed():
            corpora.append(corpus.prepare(recipe, directory))
        return dict(corpora[0].identity) if corpora else {}

    with dog.patience("reading the data", PATIENCE):
        found = disagreements(on_all_ranks(body))
    if found:
        raise EnvironmentUnfit("the ranks have different data; give every node the same files", found)
    (made,) = corpora
    _tell("the data", made.left_out)
    for name, left_out in made.validation_left_out.items():
        _tell(f"data.validation_sets.{name}", left_out)
    return made


def _read(recipe: Recipe, directory: Path, dog: Watchdog, readers: _Readers) -> Corpus:
    def go_on() -> None:
        dog.beat("reading the data")
        readers.go_on()

    failed = True
    try:
        made = corpus.prepare(recipe, directory, told(go_on))
        failed = False
    finally:
        readers.end(failed=failed)
    return made


def _wait(readers: _Readers, dog: Watchdog) -> None:
    """Returns when every reader has ended; what they read meanwhile counts as our progress."""
    seen, pause = 0, 0.05
    while not readers.have_ended():
        if (said := readers.said()) > seen:
            seen = said
            dog.beat("waiting for the rank that reads the data")
        time.sleep(pause)
        pause = min(SECONDS, 2 * pause)


def told(others: Callable[[], None] = lambda: None) -> Callable[[int], None]:
    """What to call with the number of tokens read so far: says so to the `others`, and to a person."""
    said, shown = time.monotonic(), time.monotonic()

    def progress(tokens: int) -> None:
        nonlocal said, shown
        now = time.monotonic()
        if now - said < SECONDS:
            return
        others()
        said = now
        if now - shown >= LINE_SECONDS:
            _log.info("reading the data: %s tokens", f"{tokens:,}")
            shown = now

    return progress


def _tell(where: str, left_out: LeftOut) -> None:
    """What was left out of a data set, with the first few reasons of each kind."""
    skipped, deleted, cut = left_out.skipped, left_out.deleted, left_out.cut
    corrupt = f"{where} has {skipped:,} corrupt rows or files, which are skipped"
    long = f"of the rows of {where} that are too long {deleted:,} are deleted and {cut:,} cut"
    for what, count, first in (
        (corrupt, skipped, left_out.skipped_rows),
        (long, deleted + cut, left_out.long_rows),
    ):
        more = ["and others, which `check` lists"] if len(first) > SHOWN else []
        if count:
            _log.info("\n  - ".join([what, *first[:SHOWN], *more]))


class Loader:
    """The micro-batches of one data-parallel rank; a global batch is the same for any number of ranks.

    The only state is how many samples were consumed.
    """

    def __init__(self, recipe: Recipe, corpus: Corpus, rank: int, dp: int) -> None:
        """`rank` of `dp` data-parallel ranks; micro_batch_size x dp must divide the global batch."""
        self._recipe, self._corpus, self._rank, self._dp = recipe, corpus, rank, dp

    def training(self, consumed: int) -> list[Batch]:
        """The micro-batches of the step that begins after `consumed` samples of the whole run."""
        return list(self._batches(self._corpus.training, self._draw_samples(consumed)))

    def sizes(self, consumed: int) -> Sizes:
        """Return the sizes of that step's samples on all data-parallel ranks together."""
        return self._corpus.training.sizes(self._draw_samples(consumed))

    def _draw_samples(self, consumed: int) -> Ints:
        return self._corpus.order.drawn(consumed, self._recipe.train.global_batch_size)

    def once(self) -> Iterator[list[Batch]]:
        """The micro-batches of every sample to train on, a global batch at a time, filled up with BLANK."""
        size, count = self._recipe.train.global_batch_size, len(self._corpus.training)
        numbers = np.concatenate([np.arange(count), np.full(-count % size, BLANK)])
        for first in range(0, len(numbers), size):
            yield list(self._batches(self._corpus.training, numbers[first : first + size]))

    def validation(self) -> dict[str, list[Batch]]:
        """The micro-batches of one evaluation, the same each time, by what is evaluated.

        No sample comes twice. Every rank has as many micro-batches: what is missing has no loss.
        """
        return {name: self._evaluation(samples) for name, samples in self._corpus.validation.items()}

    def _evaluation(self, samples: Samples) -> list[Batch]:
        train = self._recipe.train
        count = min(train.eval_batches * train.global_batch_size, len(samples))
        numbers = permutation(len(samples), f"evaluation {self._recipe.seed}")[:count]
        blanks = np.full(-count % train.global_batch_size, BLANK)
        return list(self._batches(samples, np.concatenate([numbers, blanks])))

    def _batches(self, samples: Samples, numbers: Ints) -> Iterator[Batch]:
        """This rank's share of `numbers`, a whole number of global batches."""
        for whole in numbers.reshape(-1, self._recipe.train.global_batch_size):
            for portion in self._share(whole, samples.patches(whole)):
                yield samples.batch(portion)

    def _share(self, whole: Ints, patches: Ints) -> Ints:
        """This rank's part of a global batch: [micro-batches, samples of one].

        Where samples have unequally many `patches`, the micro-batches and then the ranks share them out, so
        that no tower has much more to do than others. Micro-batches are the same for any number of ranks.
        """
        size = self._recipe.train.micro_batch_size
        micro_batches = np.arange(len(whole)).reshape(-1, size)
        shared = np.arange(len(micro_batches)).reshape(-1, self._dp).T
        if len(np.unique(patches)) > 1:
            micro_batches = dealt(patches, len(micro_batches))
            shared = dealt(patches[micro_batches].sum(1), self._dp)
        share: Ints = whole[micro_batches[shared[self._rank]]]
        return share
