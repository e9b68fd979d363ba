"""Training data: tokenizers, files, samples, and which of them a rank takes when. Imports no megatron."""

from bundle.data.corpus import Corpus, changed, prepare
from bundle.data.loader import Loader
from bundle.data.samples import Batch, Samples

__all__ = ["Batch", "Corpus", "Loader", "Samples", "changed", "prepare"]
