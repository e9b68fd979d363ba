"""Training data: tokenizers, files, samples, and which of them a rank takes when. Imports no megatron."""

from bundle.training.data.corpus import Corpus, changed, prepare
from bundle.training.data.feed import Feed
from bundle.training.data.samples import Batch, Samples

__all__ = ["Batch", "Corpus", "Feed", "Samples", "changed", "prepare"]
