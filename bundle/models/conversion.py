"""Weights on a disk, tensor by tensor: read from any of three forms, compared, and taken from one to another.

A Hugging Face directory, one of megatron's own checkpoints (torch_dist), and that under its model's published
names. In one process on a CPU; beside one tensor there is nothing in memory, and no model is built.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from bundle import files
from bundle.architectures import spellings, tensors
from bundle.architectures.spellings import Place
from bundle.architectures.tensors import Tensors
from bundle.errors import UsageError
from bundle.mcore.torch_dist import Directory, Part, write
from bundle.models import loading
from bundle.models.exporting import find_copies
from bundle.models.finite import FiniteCheck
from bundle.models.mapped import Files
from bundle.models.merging import Base, Merged
from bundle.models.published import DTYPES, Output, files_of, parts, stored
from bundle.pretrained import Pretrained, refuse_unequal, replacing, writing
from bundle.pretrained.directory import FP8, MXFP4, SCALE, summarized
from bundle.pretrained.writing import Numbers, Published

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
        self._weights, self._files = weights, Files()
        kinds = {**DTYPES, MXFP4: torch.bfloat16}
        self.tensors = {
            name: (entry.shape, kinds[entry.dtype])
            for name, entry in weights.entries.items()
            if entry.dtype in kinds and not name.endswith(SCALE)
        }

    def read(self, name: str) -> Tensor:
        return loading.published(self._weights, name, self._files)


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
        self._of: dict[str, list[tensors.Tensor]] = {}  # more than one: the entries of a stack
        for tensor in table:
            for name in tensor.written:
                self._of.setdefault(name, []).append(tensor)
        self.tensors = {
            name: (shape, checkpoint.tensors[self._places[tensor.name].key][1])
            for tensor in table
            for name, shape in tensor.published_shapes()
        }

    def read(self, name: str) -> Tensor:
        found = [
            part
            for tensor in self._of[name]
            for published, part in zip(tensor.written, parts(tensor, self.read_tensor(tensor)), strict=True)
            if published == name
        ]
        return torch.stack(found) if self._of[name][0].stack else found[0]

    def read_tensor(self, tensor: tensors.Tensor) -> Tensor:
        """A tensor of the table."""
        place = self._places[tensor.name]
        return self._checkpoint.read(place.key, place.entry)


def found_in(checkpoint: Directory, table: Tensors) -> dict[str, Place]:
    """Where a checkpoint has each tensor that is published.

    Raises UsageError with every one that it lacks or has in another shape.
    """
    _refuse_delta_nets(table)
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
    """What holds all of a tensor's published numbers; for FP8 and MXFP4 bf16, in which such models train."""
    kinds = [weights.entries[name].dtype for name in tensor.published]
    found = [torch.bfloat16 if kind in (FP8, MXFP4) else DTYPES[kind] for kind in kinds]
    whole = found[0]
    for other in found[1:]:
        whole = torch.promote_types(whole, other)
    return whole


_AT_ONCE = 2**22  # values that are compared in float64


@dataclass(frozen=True, slots=True)
class Difference:
    """What is not alike of one tensor.

    `largest` is the largest absolute difference of two values, `relative` the same divided by the largest
    magnitude of the first; of shapes and tensors that only one has there is none.
    """

    name: str
    kind: Literal["only in the first", "only in the second", "shape", "dtype", "values"]
    first: str = ""
    second: str = ""
    largest: float | None = None
    relative: float | None = None

    def __str__(self) -> str:
        against = f": {self.first} against {self.second}" if self.first else ""
        apart = "" if self.largest is None else f"; largest {self.largest:.3g}, relative {self.relative:.3g}"
        return f"{self.name}: {self.kind}{against}{apart}".replace(": values;", ": values differ,")


def differences(first: Source, second: Source) -> Iterator[Difference]:
    """Every tensor that is not in both alike: shape, kind of numbers, values. NaN equals NaN."""
    for name in dict.fromkeys((*first.tensors, *second.tensors)):
        if name not in second.tensors:
            yield Difference(name, "only in the first")
        elif name not in first.tensors:
            yield Difference(name, "only in the second")
        else:
            yield from _of_both(name, first, second)


def _of_both(name: str, first: Source, second: Source) -> Iterator[Difference]:
    (shape, dtype), (other_shape, other_dtype) = first.tensors[name], second.tensors[name]
    if shape != other_shape:
        yield Difference(name, "shape", str(list(shape)), str(list(other_shape)))
        return
    largest, relative = _apart(first.read(name), second.read(name))
    if dtype != other_dtype:
        ours, theirs = (str(kind).removeprefix("torch.") for kind in (dtype, other_dtype))
        yield Difference(name, "dtype", ours, theirs, largest, relative)
    elif largest != 0:
        yield Difference(name, "values", largest=largest, relative=relative)


def _apart(first: Tensor, second: Tensor) -> tuple[float, float]:
    """(largest absolute difference, the same divided by the first's largest magnitude)."""
    largest = magnitude = 0.0
    for a, b in zip(first.flatten().split(_AT_ONCE), second.flatten().split(_AT_ONCE), strict=True):
        one, other = a.double(), b.double()
        distance = torch.where(
            (one == other) | (one.isnan() & other.isnan()), 0.0, (one - other).abs().nan_to_num(torch.inf)
        )
        largest = max(largest, float(distance.max()))
        magnitude = max(magnitude, float(one.abs().nan_to_num(0.0).max()))
    return largest, 0.0 if largest == 0 else largest / magnitude if magnitude else torch.inf


# Where Megatron-LM's --load looks first, and the name of weights that no training has written.
TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"


def to_hugging_face(
    checkpoint: Directory,
    model: Published,
    directory: Path,
    numbers: Numbers,
    base: Base | None = None,
) -> None:
    """Writes a directory that transformers opens, in the place of one that has that name.

    `base`: what the checkpoint's adapters are merged into; None: it holds all weights. Raises UsageError,
    before anything is written, for a checkpoint that does not hold all that is published; JobFailed where it
    cannot be read or the files cannot be written. What had the name before is there until the new one is
    whole.
    """
    table = Tensors(model.architecture, written_copies=find_copies(directory, model))
    if numbers == "fp8" and table.names.stacked_experts:
        raise UsageError(f"nobody loads {model.architecture.model_type} in FP8 blocks: write it in bf16")
    merged = Merged(checkpoint, table, base) if base else None
    source = merged or AsPublished(checkpoint, table)
    everything = list(table.published())
    (of_files,) = files_of([[each for tensor in everything for each in stored(tensor, numbers)]])
    with replacing.replacing(directory) as whole:
        output = Output(whole, of_files)
        for tensor in everything:
            output.append(tensor, source.read_tensor(tensor), numbers)
        output.close()
        if merged:
            merged.conclude()
        writing.complete(whole, model, numbers, of_files)


def to_torch_dist(weights: Pretrained, table: Tensors, directory: Path) -> None:
    """Writes a directory that Megatron-LM's `--load` takes, in the place of one that has that name.

    `weights` must have been held against the table. Layers for MTP that are not published are not written.
    Raises UsageError for models with gated delta nets and for values that are not finite, JobFailed; what had
    the name before is there until the new one is whole.
    """
    _refuse_delta_nets(table)
    refuse_unequal(weights, table.copies())
    a = table.architecture
    check = FiniteCheck(weights)
    parts = list(_parts(weights, table, check))
    places = (spellings.Place(part.key, part.entry, part.entries) for part in parts)
    empty = dict.fromkeys(spellings.object_key(place) for place in spellings.extra_states(places))
    arguments = {
        "num_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "num_attention_heads": a.num_attention_heads,
        "add_position_embedding": True,  # Megatron-LM's default, which it compares
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }
    with replacing.replacing(directory) as whole:
        (whole / RELEASE).mkdir()
        write(whole / RELEASE, parts, empty, arguments=arguments, content=spellings.checkpoint_content(a))
        check.conclude()
        files.write_text(whole / TRACKER, f"{RELEASE}\n")


def _refuse_delta_nets(table: Tensors) -> None:
    """Raises UsageError for a model whose tensors megatron's checkpoints have in parts of other names."""
    if table.architecture.delta_net is not None:
        raise UsageError(
            f"{table.architecture.model_type}: gated delta nets are neither read from nor written as"
            " megatron-core's checkpoints: train with checkpoint.export: hf"
        )


def newest(named: Path) -> Path:
    """The torch_dist directory that is `named`, or the one that Megatron-LM's --load would take from it.

    Raises UsageError where that cannot be known.
    """
    said = files.read(named / TRACKER)
    if said is None:
        return named
    if said.strip() == RELEASE:
        return named / RELEASE
    if not said.strip().isdecimal():
        raise UsageError(f"{named / TRACKER}: says neither {RELEASE} nor a number of steps")
    return named / f"iter_{int(said):07d}"


def _parts(weights: Pretrained, table: Tensors, check: FiniteCheck) -> Iterator[Part]:
    opened = Files()
    for tensor in table:
        if tensor.published:
            dtype = dtype_of(weights, tensor)
            for place in spellings.written(tensor, table.architecture):
                values = partial(loading.whole, weights, tensor, dtype, opened, check)
                yield Part(place.key, place.entry, place.entries, tensor.shape, dtype, values)
