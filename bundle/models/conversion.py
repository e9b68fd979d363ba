"""Between megatron's own checkpoints (torch_dist) and Hugging Face directories, in one process on a CPU.

Tensor by tensor, so that beside one of them there is nothing in memory; no model is built.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bundle import files
from bundle.architectures import spellings, tensors
from bundle.architectures.tensors import Tensors
from bundle.errors import UsageError
from bundle.mcore.torch_dist import Directory, Part, write
from bundle.models import loading
from bundle.models.exporting import warn_of_left_out
from bundle.models.published import Output, files_of, stored
from bundle.models.sources import AsPublished, dtype_of
from bundle.pretrained import Pretrained, writing
from bundle.pretrained.writing import Numbers, Published

# Where Megatron-LM's --load looks first, and the name of weights that no training has written.
TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"


def to_hugging_face(checkpoint: Directory, model: Published, directory: Path, numbers: Numbers) -> None:
    """Writes a directory that transformers opens, in the place of one that has that name.

    Raises UsageError, before anything is written, for a checkpoint that does not hold all that is published;
    JobFailed where it cannot be read or the files cannot be written. What had the name before is there until
    the new one is whole.
    """
    table = Tensors(model.architecture)
    source = AsPublished(checkpoint, table)
    warn_of_left_out(directory, table)
    everything = [tensor for tensor in table if tensor.published]
    (of_files,) = files_of([[each for tensor in everything for each in stored(tensor, numbers)]])
    with writing.replacing(directory) as whole:
        output = Output(whole, of_files)
        for tensor in everything:
            output.append(tensor, source.whole(tensor), numbers)
        output.close()
        writing.complete(whole, model, numbers, of_files)


def to_torch_dist(weights: Pretrained, table: Tensors, directory: Path) -> None:
    """Writes a directory that Megatron-LM's `--load` takes, in the place of one that has that name.

    `weights` must have been held against the table. Layers for MTP that are not published are not written.
    Raises JobFailed; what had the name before is there until the new one is whole.
    """
    loading.refuse_unequal(weights, table.copies())
    a = table.architecture
    parts = list(_parts(weights, table))
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
    with writing.replacing(directory) as whole:
        (whole / RELEASE).mkdir()
        write(whole / RELEASE, parts, empty, arguments=arguments, content=spellings.checkpoint_content(a))
        files.write_text(whole / TRACKER, f"{RELEASE}\n")


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


def _parts(weights: Pretrained, table: Tensors) -> Iterator[Part]:
    for tensor in table:
        if tensor.published:
            dtype = dtype_of(weights, tensor)
            for place in spellings.written(tensor, table.architecture):
                values = partial(_values, weights, tensor, dtype)
                yield Part(place.key, place.entry, place.entries, tensor.shape, dtype, values)


def _values(weights: Pretrained, tensor: tensors.Tensor, dtype: torch.dtype) -> Tensor:
    return loading.whole(weights, tensor, dtype)
