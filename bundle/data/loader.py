"""Which samples a rank takes at which point of a run; the only state is how many samples were consumed."""

from collections.abc import Iterator

import numpy as np

from bundle.data.corpus import Corpus
from bundle.data.samplers import Ints, permutation
from bundle.data.samples import BLANK, Batch, Samples
from bundle.recipe import Recipe


class Loader:
    """The micro-batches of one data-parallel rank; a global batch is the same for any number of ranks."""

    def __init__(self, recipe: Recipe, corpus: Corpus, rank: int, dp: int) -> None:
        """`rank` of `dp` data-parallel ranks; micro_batch_size x dp must divide the global batch."""
        self._recipe, self._corpus, self._rank, self._dp = recipe, corpus, rank, dp

    def training(self, consumed: int) -> list[Batch]:
        """The micro-batches of the step that begins after `consumed` samples of the whole run."""
        numbers = self._corpus.order.drawn(consumed, self._recipe.train.global_batch_size)
        return list(self._batches(self._corpus.training, numbers))

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
        portions = numbers.reshape(-1, self._dp, self._recipe.train.micro_batch_size)
        for portion in portions[:, self._rank]:
            yield samples.batch(portion)
