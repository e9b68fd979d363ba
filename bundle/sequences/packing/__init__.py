"""Packing sequences into the tensors that a model takes, and the way back."""

from bundle.sequences.packing.masks import Masks, masks
from bundle.sequences.packing.packing import Packing
from bundle.sequences.packing.zigzag import join, shard

__all__ = ["Masks", "Packing", "join", "masks", "shard"]
