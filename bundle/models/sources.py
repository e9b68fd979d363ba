"""Weights that lie on a disk, read tensor by tensor: a Hugging Face directory, a torch_dist checkpoint, and
that checkpoint under the published names.
"""

import itertools
import re
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from bundle.architectures import spellings, tensors
from bundle.architectures.spellings import Place
from bundle.architectures.tensors import Tensors
from bundle.errors import UsageError
from bundle.mcore.torch_dist import Directory
from bundle.models import loading
from bundle.models.published import DTYPES, parts
from bundle.pretrained import Pretrained
from bundle.pretrained.directory import FP8, SCALE, summarized

_OPTIMIZER = re.compile(r"(^|\.)optimizer\.")


class Source(Protocol):
    """Tensors by their names, with the shape of each and what its numbers are stored as."""

    @property
    def tensors(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]: ...

    def read(self, name: str) -> Tensor:
        """All of a tensor; numbers in FP8 are multiplied by their scales."""
        ...


class HuggingFace:
    """A Hugging Face directory; scales are no tensors of their own."""

    def __init__(self, weights: Pretrained) -> None:
        self._weights = weights
        self.tensors = {
            name: (entry.shape, DTYPES[entry.dtype])
            for name, entry in weights.entries.items()
            if entry.dtype in DTYPES and not name.endswith(SCALE)
        }

    def read(self, name: str) -> Tensor:
        return loading.published(self._weights, name)


class Megatron:
    """The weights of a torch_dist checkpoint by its own keys; those with many tensors are divided."""

    def __init__(self, checkpoint: Directory) -> None:
        self._checkpoint = checkpoint
        self._of: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.tensors = {}
        for key, (shape, dtype) in checkpoint.tensors.items():
            if _OPTIMIZER.search(key):
                continue
            many = spellings.stacked(key)
            for entry in itertools.product(*map(range, shape[:many])):
                name = f"{key}{list(entry) or ''}"
                self._of[name] = key, entry
                self.tensors[name] = shape[many:], dtype

    def read(self, name: str) -> Tensor:
        return self._checkpoint.read(*self._of[name])


class AsPublished:
    """A torch_dist checkpoint under the published names of its model."""

    def __init__(self, checkpoint: Directory, table: Tensors) -> None:
        """Raises UsageError with every tensor that the checkpoint lacks or has in another shape."""
        self._checkpoint = checkpoint
        self._places = found_in(checkpoint, table)
        self._of = {name: tensor for tensor in table for name in tensor.published}
        self.tensors = {
            name: (shape, checkpoint.tensors[self._places[tensor.name].key][1])
            for tensor in table
            for name, shape in tensor.published_shapes()
        }

    def read(self, name: str) -> Tensor:
        tensor = self._of[name]
        of_it = zip(tensor.published, parts(tensor, self.whole(tensor)), strict=True)
        return next(part for published, part in of_it if published == name)

    def whole(self, tensor: tensors.Tensor) -> Tensor:
        """A tensor of the table."""
        place = self._places[tensor.name]
        return self._checkpoint.read(place.key, place.entry)


def found_in(checkpoint: Directory, table: Tensors) -> dict[str, Place]:
    """Where a checkpoint has each tensor that is published.

    Raises UsageError with every one that it lacks or has in another shape.
    """
    found, violations = {}, []
    for tensor in table:
        if not tensor.published:
            continue
        places = spellings.places(tensor, table.architecture)
        there = next((place for place in places if place.key in checkpoint.tensors), None)
        if there is None:
            violations.append(
                f"{tensor.name} is missing: there is none of {', '.join(p.key for p in places)}"
            )
            continue
        shape, _ = checkpoint.tensors[there.key]
        if shape != (wanted := (*there.entries, *tensor.shape)):
            violations.append(f"{there.key} is {list(shape)}, the model's is {list(wanted)}")
        found[tensor.name] = there
    if violations:
        raise UsageError(f"{checkpoint.root}: not the weights of this model", summarized(violations))
    return found


def dtype_of(weights: Pretrained, tensor: tensors.Tensor) -> torch.dtype:
    """What holds all of a tensor's published numbers; for those in FP8 bf16, in which such models train."""
    kinds = [weights.entries[name].dtype for name in tensor.published]
    found = [torch.bfloat16 if kind == FP8 else DTYPES[kind] for kind in kinds]
    whole = found[0]
    for other in found[1:]:
        whole = torch.promote_types(whole, other)
    return whole
