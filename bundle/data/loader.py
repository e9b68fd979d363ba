"""Which samples a rank takes at which point of a run; the only state is how many samples were consumed."""

from collections.abc import Iterator

import numpy as np

from bundle.data.corpus import Corpus
from bundle.data.samplers import Ints, drawn, permutation
from bundle.data.samples import BLANK, Batch, Samples
from bundle.recipe import Recipe


class Loader:
    """The micro-batches of one data-parallel rank; a global batch is the same for any number of ranks."""

    def __init__(self, recipe: Recipe, corpus: Corpus, rank: int, dp: int) -> None:
        """`rank` of `dp` data-parallel ranks; micro_batch_size x dp must divide the global batch."""
        self._recipe, self._corpus, self._rank, self._dp = recipe, corpus, rank, dp

    def training(self, consumed: int) -> list[Batch]:
        """The micro-batches of the step that begins after `consumed` samples of the whole run."""
        samples, size = self._corpus.training, self._recipe.train.global_batch_size
        return list(self._batches(samples, drawn(consumed, size, len(samples), self._recipe.seed)))

    def validation(self) -> list[Batch]:
        """The micro-batches of one evaluation, the same each time; empty when nothing is held out.

        No sample comes twice. Every rank has as many micro-batches: what is missing has no loss.
        """
        samples, train = self._corpus.validation, self._recipe.train
        if samples is None:
            return []
        count = min(train.eval_batches * train.global_batch_size, len(samples))
        numbers = permutation(len(samples), f"evaluation {self._recipe.seed}")[:count]
        blanks = np.full(-count % train.global_batch_size, BLANK)
        return list(self._batches(samples, np.concatenate([numbers, blanks])))

    def _batches(self, samples: Samples, numbers: Ints) -> Iterator[Batch]:
        """This rank's share of `numbers`, a whole number of global batches."""
        portions = numbers.reshape(-1, self._dp, self._recipe.train.micro_batch_size)
        for portion in portions[:, self._rank]:
            yield samples.batch(portion)
