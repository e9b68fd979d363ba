"""Packing sequences into the tensors that a model takes, and the way back."""

from bundle.sequences.packing.packing import Packing
from bundle.sequences.packing.zigzag import join, shard

__all__ = ["Packing", "join", "shard"]
