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
from bundle.architectures import checkpoint_names, tensors
from bundle.architectures.checkpoint_names import CheckpointLocation
from bundle.architectures.tensors import Tensors
from bundle.errors import UsageError
from bundle.mcore.torch_dist import StackedTensorSlice, TorchDistCheckpoint, write
from bundle.models import loading
from bundle.models.exporting import list_tensor_copies_to_write
from bundle.models.finite_check import FiniteCheck
from bundle.models.mapped_files import MappedFiles
from bundle.models.merging import AdapterBaseModel, MergedTensors
from bundle.models.publishing import (
    TORCH_DTYPE_BY_SAFETENSORS_NAME,
    PublishedWriter,
    list_stored_tensors,
    plan_files_by_writer,
    split_into_published,
)
from bundle.pretrained import PretrainedWeights, refuse_unequal_copies, replacing, writing
from bundle.pretrained.directory import FP8, MXFP4, SCALE_SUFFIX, limit_violations
from bundle.pretrained.writing import PublishedModel, WeightFormat

_OPTIMIZER_PATTERN = re.compile(r"(^|\.)optimizer\.")


class TensorSource(Protocol):
    """Tensors by their names, with the shape of each and what its numbers are stored as."""

    @property
    def tensors(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]: ...

    def read(self, name: str) -> Tensor:
        """Return the whole tensor; numbers in FP8 are multiplied by their scales."""
        ...


class HuggingFaceDirectoryTensors:
    """A Hugging Face directory; scales are no tensors of their own."""

    def __init__(self, weights: PretrainedWeights) -> None:
        self._weights, self._files = weights, MappedFiles()
        kinds = {**TORCH_DTYPE_BY_SAFETENSORS_NAME, MXFP4: torch.bfloat16}
        self.tensors = {
            name: (entry.shape, kinds[entry.dtype])
            for name, entry in weights.entries.items()
            if entry.dtype in kinds and not name.endswith(SCALE_SUFFIX)
        }

    def read(self, name: str) -> Tensor:
        return loading.read_published(self._weights, name, self._files)


class TorchDistMegatronTensors:
    """The weights of a torch_dist checkpoint by its own keys; those with many tensors are divided."""

    def __init__(self, checkpoint: TorchDistCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._keys_by_name: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.tensors = {}
        for key, (shape, dtype) in checkpoint.tensors.items():
            if _OPTIMIZER_PATTERN.search(key):
                continue
            stack_dims = checkpoint_names.count_layer_and_expert_dims(key)
            for entry in itertools.product(*map(range, shape[:stack_dims])):
                name = f"{key}{list(entry) or ''}"
                self._keys_by_name[name] = key, entry
                self.tensors[name] = shape[stack_dims:], dtype

    def read(self, name: str) -> Tensor:
        return self._checkpoint.read(*self._keys_by_name[name])


class TorchDistPublishedTensors:
    """A torch_dist checkpoint under the published names of its model."""

    def __init__(self, checkpoint: TorchDistCheckpoint, table: Tensors) -> None:
        """Raise UsageError with every tensor that the checkpoint lacks or has in another shape."""
        self._checkpoint = checkpoint
        self._places = map_megatron_names_to_locations(checkpoint, table)
        self._tensors_by_name: dict[str, list[tensors.Tensor]] = {}  # more than one: the entries of a stack
        for tensor in table:
            for name in tensor.published_and_copy_names:
                self._tensors_by_name.setdefault(name, []).append(tensor)
        self.tensors = {
            name: (shape, checkpoint.tensors[self._places[tensor.name].key][1])
            for tensor in table
            for name, shape in tensor.list_published_shapes()
        }

    def read(self, name: str) -> Tensor:
        values = [
            part
            for tensor in self._tensors_by_name[name]
            for published, part in zip(
                tensor.published_and_copy_names,
                split_into_published(tensor, self.read_megatron_tensor(tensor)),
                strict=True,
            )
            if published == name
        ]
        return torch.stack(values) if self._tensors_by_name[name][0].stack else values[0]

    def read_megatron_tensor(self, tensor: tensors.Tensor) -> Tensor:
        """Return a tensor of the table."""
        place = self._places[tensor.name]
        return self._checkpoint.read(place.key, place.entry)


def map_megatron_names_to_locations(
    checkpoint: TorchDistCheckpoint, table: Tensors
) -> dict[str, CheckpointLocation]:
    """Return the location of each published tensor in a checkpoint.

    Raises UsageError with every tensor that the checkpoint lacks or has in another shape.
    """
    _refuse_delta_nets(table)
    places_by_name, violations = {}, []
    for tensor in table:
        if not tensor.published_names:
            continue
        places = checkpoint_names.list_candidate_torch_dist_locations(tensor, table.architecture)
        stored_place = next((place for place in places if place.key in checkpoint.tensors), None)
        if stored_place is None:
            violations.append(
                f"{tensor.name} is missing: the checkpoint has none of {', '.join(p.key for p in places)}"
            )
            continue
        shape, _ = checkpoint.tensors[stored_place.key]
        if shape != (expected := (*stored_place.entries, *tensor.shape)):
            violations.append(f"{stored_place.key} has shape {list(shape)}, but needs {list(expected)}")
        places_by_name[tensor.name] = stored_place
    if violations:
        raise UsageError(
            f"{checkpoint.root}: the weights do not fit this model", limit_violations(violations)
        )
    return places_by_name


def promote_published_dtypes(weights: PretrainedWeights, tensor: tensors.Tensor) -> torch.dtype:
    """Return the dtype that holds all of a tensor's published numbers.

    For FP8 and MXFP4 it is bf16, in which such models train.
    """
    kinds = [weights.entries[name].dtype for name in tensor.published_names]
    dtypes = [
        torch.bfloat16 if kind in (FP8, MXFP4) else TORCH_DTYPE_BY_SAFETENSORS_NAME[kind] for kind in kinds
    ]
    dtype = dtypes[0]
    for other in dtypes[1:]:
        dtype = torch.promote_types(dtype, other)
    return dtype


_COMPARISON_CHUNK_VALUES = 2**22  # values that are compared in float64


@dataclass(frozen=True, slots=True)
class TensorDifference:
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
        is_alone = self.kind.startswith("only")
        text = f"{self.kind} model" if is_alone else f"{self.kind.removesuffix('s')}s differ"
        if self.first:
            text += f" ({self.first} and {self.second})"
        if self.largest is not None:
            text += f"; largest difference {self.largest:.3g}, relative difference {self.relative:.3g}"
        return f"{self.name}: {text}"


def find_differences(first: TensorSource, second: TensorSource) -> Iterator[TensorDifference]:
    """Yield every tensor that differs in shape, kind of numbers or values, or is in one source only.

    NaN equals NaN.
    """
    for name in dict.fromkeys((*first.tensors, *second.tensors)):
        if name not in second.tensors:
            yield TensorDifference(name, "only in the first")
        elif name not in first.tensors:
            yield TensorDifference(name, "only in the second")
        else:
            yield from _compare_tensor(name, first, second)


def _compare_tensor(name: str, first: TensorSource, second: TensorSource) -> Iterator[TensorDifference]:
    (shape, dtype), (other_shape, other_dtype) = first.tensors[name], second.tensors[name]
    if shape != other_shape:
        yield TensorDifference(name, "shape", str(list(shape)), str(list(other_shape)))
        return
    largest, relative = _measure_difference(first.read(name), second.read(name))
    if dtype != other_dtype:
        ours, theirs = (str(kind).removeprefix("torch.") for kind in (dtype, other_dtype))
        yield TensorDifference(name, "dtype", ours, theirs, largest, relative)
    elif largest != 0:
        yield TensorDifference(name, "values", largest=largest, relative=relative)


def _measure_difference(first: Tensor, second: Tensor) -> tuple[float, float]:
    """Return the largest absolute difference, and that divided by the first's largest magnitude."""
    largest = magnitude = 0.0
    for a, b in zip(
        first.flatten().split(_COMPARISON_CHUNK_VALUES),
        second.flatten().split(_COMPARISON_CHUNK_VALUES),
        strict=True,
    ):
        one, other = a.double(), b.double()
        distance = torch.where(
            (one == other) | (one.isnan() & other.isnan()), 0.0, (one - other).abs().nan_to_num(torch.inf)
        )
        largest = max(largest, float(distance.max()))
        magnitude = max(magnitude, float(one.abs().nan_to_num(0.0).max()))
    return largest, 0.0 if largest == 0 else largest / magnitude if magnitude else torch.inf


# Where Megatron-LM's --load looks first, and the name of weights that no training has written.
TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"


def write_full_hugging_face_model(
    checkpoint: TorchDistCheckpoint,
    model: PublishedModel,
    directory: Path,
    numbers: WeightFormat,
    base: AdapterBaseModel | None = None,
) -> None:
    """Write a directory that transformers opens, and replace the one that has that name.

    `base`: the model that the checkpoint's adapters are merged into; None: the checkpoint holds all weights.
    Raises UsageError, before anything is written, for a checkpoint that lacks published tensors; JobFailed
    where it cannot be read or the files cannot be written. The previous directory stays until the new one is
    complete.
    """
    table = Tensors(model.architecture, written_copies=list_tensor_copies_to_write(directory, model))
    if numbers == "fp8" and table.names.stacked_experts:
        raise UsageError(f"no loader reads {model.architecture.model_type} in FP8 blocks: export it in bf16")
    merged = MergedTensors(checkpoint, table, base) if base else None
    source = merged or TorchDistPublishedTensors(checkpoint, table)
    everything = list(table.iterate_in_publishing_order())
    (planned_files,) = plan_files_by_writer(
        [[entry for tensor in everything for entry in list_stored_tensors(tensor, numbers)]]
    )
    with replacing.replace_directory(directory) as new_directory:
        output = PublishedWriter(new_directory, planned_files)
        for tensor in everything:
            output.append(tensor, source.read_megatron_tensor(tensor), numbers)
        output.close_and_raise_error()
        if merged:
            merged.refuse_nonfinite_read_weights()
        writing.write_remaining_files(new_directory, model, numbers, planned_files)


def to_torch_dist(weights: PretrainedWeights, table: Tensors, directory: Path) -> None:
    """Write a directory that Megatron-LM's `--load` takes, and replace the one that has that name.

    `weights` must have been compared with the table. Layers for MTP that are not published are not written.
    Raises UsageError for models with gated delta nets and for values that are not finite, and JobFailed. The
    previous directory stays until the new one is complete.
    """
    _refuse_delta_nets(table)
    refuse_unequal_copies(weights, table.map_copies())
    architecture = table.architecture
    check = FiniteCheck(weights)
    parts = list(_build_entries(weights, table, check))
    places = (checkpoint_names.CheckpointLocation(part.key, part.entry, part.entries) for part in parts)
    empty_keys = dict.fromkeys(
        checkpoint_names.build_object_key(place)
        for place in checkpoint_names.derive_extra_state_locations(places)
    )
    arguments = {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "num_attention_heads": architecture.num_attention_heads,
        "add_position_embedding": True,  # Megatron-LM's default, which it compares
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }
    with replacing.replace_directory(directory) as new_directory:
        (new_directory / RELEASE).mkdir()
        write(
            new_directory / RELEASE,
            parts,
            empty_keys,
            arguments=arguments,
            content_metadata=checkpoint_names.build_key_layout_metadata(architecture),
        )
        check.refuse_nonfinite_tensors()
        files.write_text(new_directory / TRACKER, f"{RELEASE}\n")


def _refuse_delta_nets(table: Tensors) -> None:
    """Raise UsageError for a model whose tensors megatron's checkpoints hold in parts of other names."""
    if table.architecture.delta_net is not None:
        raise UsageError(
            f"{table.architecture.model_type}: gated delta nets cannot be converted to or from"
            " megatron-core checkpoints. Train with checkpoint.export: hf"
        )


def resolve_tracked_checkpoint(directory: Path) -> Path:
    """Return `directory` if it is a torch_dist directory, else the one in it that Megatron-LM's --load takes.

    Raises UsageError where that cannot be known.
    """
    content = files.read_text_if_small(directory / TRACKER)
    if content is None:
        return directory
    if content.strip() == RELEASE:
        return directory / RELEASE
    if not content.strip().isdecimal():
        raise UsageError(f"{directory / TRACKER}: must contain {RELEASE} or a number of steps")
    return directory / f"iter_{int(content):07d}"


def _build_entries(
    weights: PretrainedWeights, table: Tensors, check: FiniteCheck
) -> Iterator[StackedTensorSlice]:
    mapped_files = MappedFiles()
    for tensor in table:
        if tensor.published_names:
            dtype = promote_published_dtypes(weights, tensor)
            for place in checkpoint_names.find_torch_dist_save_locations(tensor, table.architecture):
                values = partial(loading.read_whole_tensor, weights, tensor, dtype, mapped_files, check)
                yield StackedTensorSlice(place.key, place.entry, place.entries, tensor.shape, dtype, values)
