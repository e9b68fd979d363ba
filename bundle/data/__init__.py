"""Training data: tokenizers, files, samples, and which of them a rank takes when. Imports no megatron."""

from bundle.data.corpus import Corpus, prepare
from bundle.data.loader import Loader
from bundle.data.samples import SampleBatch, Samples

__all__ = ["Corpus", "Loader", "SampleBatch", "Samples", "prepare"]
