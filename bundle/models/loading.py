"""Fills model chunks with the weights of a Hugging Face directory; each rank reads its own slices alone.

Slices go from the file into the parameter one by one, in the order of the files: beside the model there are
never more than a few megabytes of one.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bundle import pretrained
from bundle.architectures import adapters, tensors
from bundle.architectures.published_names import PUBLISHED_NAMES
from bundle.architectures.tensors import Tensors
from bundle.distributed.world import run_and_all_gather_results, run_on_rank_0
from bundle.errors import JobFailed
from bundle.mcore.groups import Groups
from bundle.models import naming
from bundle.models.finite_check import FiniteCheck
from bundle.models.mapped_files import MappedFiles
from bundle.models.naming import GloballyNamedTensor, Shard
from bundle.models.publishing import TORCH_DTYPE_BY_SAFETENSORS_NAME, dequantize_blocks, dequantize_mxfp4
from bundle.pretrained import PretrainedWeights, StoredTensor
from bundle.pretrained.directory import FP8, MX_BLOCKS_SUFFIX, MX_SCALES_SUFFIX, MX_SIZE, MXFP4, SCALE_SUFFIX
from bundle.recipe import Recipe

Slices = tuple[slice, ...]
_CHUNK_BYTES = 2**23  # bytes: what is looked at is still near when it is copied


@dataclass(frozen=True)
class TensorRead:
    """A part of a published tensor, and the part of a parameter that it becomes.

    `stack_entry`: of a stack's entry, whose rows and columns are the parameter's here; None: it is no stack.
    """

    name: str
    entry: StoredTensor
    source: Slices
    target: Tensor
    stack_entry: int | None = None


def load_and_list_unpublished(
    chunks: Sequence[torch.nn.Module], groups: Groups, weights: PretrainedWeights, table: Tensors
) -> list[GloballyNamedTensor]:
    """Overwrite all tensors that `table` marks as published; return the others. All ranks call it.

    Raises UsageError for copies that differ from their original and for values that are not finite, JobFailed
    for files that cannot be read.
    """
    run_on_rank_0(lambda: pretrained.refuse_unequal_copies(weights, table.map_copies()))
    published = {tensor.name: tensor for tensor in table if tensor.published_names}
    local_tensors = [
        named
        for chunk in chunks
        for named in (*naming.find_parameters(chunk, groups), *naming.find_expert_biases(chunk, groups))
    ]
    unpublished = [named for named in local_tensors if named.name not in published]
    if unknown := [named.name for named in unpublished if not named.name.startswith("mtp.")]:
        raise JobFailed(
            f"{unknown[0]}: the weights cannot be loaded, because mcore-bundle does not know the published"
            " name of this megatron-core parameter. Report it with the recipe, or set model.weights: random."
        )
    pairs = [(named, published[named.name]) for named in local_tensors if named.name in published]
    with torch.no_grad():
        reads = itertools.chain.from_iterable(_plan_reads(weights, *pair) for pair in pairs)
        run_and_all_gather_results(lambda: _read_and_check_finite(weights, reads))
    return unpublished


def load_adapters(matrices: Sequence[GloballyNamedTensor], recipe: Recipe) -> None:
    """Overwrite the matrices that the recipe's adapter (in PEFT's format) holds. All ranks call it.

    Raises UsageError for an adapter of another model, or with values that are not finite, JobFailed for a
    file that cannot be read.
    """

    def read_adapters() -> None:
        adapter_weights = pretrained.find_recipe_adapter(recipe)
        if adapter_weights is not None:
            names = PUBLISHED_NAMES[recipe.architecture.model_type]
            pairs = (
                (named, adapters.build_adapter_tensor(named.name, named.compute_full_shape(), names))
                for named in matrices
            )
            # PEFT knows no MTP layers
            available = (pair for pair in pairs if pair[1].published_names[0] in adapter_weights.entries)
            _read_and_check_finite(
                adapter_weights,
                itertools.chain.from_iterable(_plan_reads(adapter_weights, *pair) for pair in available),
            )

    with torch.no_grad():
        run_and_all_gather_results(read_adapters)


def read_whole_tensor(
    weights: PretrainedWeights,
    tensor: tensors.Tensor,
    dtype: torch.dtype,
    files: MappedFiles,
    check: FiniteCheck,
) -> Tensor:
    """Return a tensor of the table, not to be written to; the file's mapped memory where it fits as it is.

    `check` checks every part that is read. Raises JobFailed for files that cannot be read.
    """
    if tensor.rule.kind in ("copy", "vocabulary") and tensor.stack is None:
        (name,) = tensor.published_names
        entry = weights.entries[name]
        if entry.shape == tensor.shape and TORCH_DTYPE_BY_SAFETENSORS_NAME.get(entry.dtype) is dtype:
            stored = files.read_tensor(name, entry)
            check.record_nonfinite_part(name, stored)
            return stored
    target = torch.empty(tensor.shape, dtype=dtype)
    _read(weights, _plan_reads(weights, GloballyNamedTensor(tensor.name, target, None), tensor), files, check)
    return target


def read_published(weights: PretrainedWeights, name: str, files: MappedFiles) -> Tensor:
    """Return a published tensor, not to be written to, in the kind of numbers that it is stored in.

    FP8 becomes fp32, and MXFP4 becomes bf16.
    """
    entry = weights.entries[name]
    if entry.dtype not in (FP8, MXFP4):
        return files.read_tensor(name, entry)
    full_slices = slice(None), slice(None)
    if entry.dtype == FP8:
        target = torch.empty(entry.shape, dtype=torch.float32)
        reads = [TensorRead(name, entry, full_slices, target)]
    else:
        target = torch.empty(entry.shape, dtype=torch.bfloat16)
        reads = [TensorRead(name, entry, full_slices, part.T, number) for number, part in enumerate(target)]
    _read(weights, reads, files)
    return target


def _plan_reads(
    weights: PretrainedWeights, named: GloballyNamedTensor, tensor: tensors.Tensor
) -> Iterator[TensorRead]:
    """Yield the reads that make this rank's part of a tensor; fill padding at once."""
    if tuple(named.compute_full_shape()) != tensor.shape:
        raise JobFailed(
            f"{named.name} has shape {named.compute_full_shape()} in megatron-core, but"
            f" {list(tensor.shape)} in the table of tensors"
        )
    joined_dim, local = tensor.rule.dim, named.parameter
    ranges = list(_list_shard_bounds_and_offsets(named.shard, tensor.shape, joined_dim))
    cut = joined_dim if named.shard is None else named.shard.dim
    offset = 0
    for piece in tensor.rule.iterate_pieces():
        name = tensor.published_names[piece.source]
        length, step = piece.length, piece.step
        for start, stop, local_start in ranges:
            source, target = ([slice(None)] * local.ndim for _ in range(2))
            source[joined_dim], target[joined_dim] = (
                slice(piece.start, piece.stop, step),
                slice(offset, offset + length),
            )
            if cut == joined_dim:
                first, last = max(offset, start), min(offset + length, stop)
                if first >= last:
                    continue
                begin = piece.start + (first - offset) * step
                source[joined_dim] = slice(begin, begin + (last - first) * step, step)
                target[joined_dim] = slice(local_start + first - start, local_start + last - start)
            else:
                source[cut], target[cut] = slice(start, stop), slice(local_start, local_start + stop - start)
            number = tensor.stack.entry if tensor.stack else None
            yield TensorRead(name, weights.entries[name], tuple(source), local[tuple(target)], number)
        offset += length
    for start, stop, local_start in ranges:
        if cut == joined_dim and stop > offset:
            first = max(offset, start)
            local.narrow(joined_dim, local_start + first - start, stop - first).zero_()


def _list_shard_bounds_and_offsets(
    shard: Shard | None, shape: tuple[int, ...], dim: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, local start) of each range of the whole that this rank holds."""
    if shard is None:
        yield 0, shape[dim], 0
        return
    begin = local_start = 0
    for block in shard.compute_block_sizes(shape[shard.dim]):
        part = block // shard.size
        start = begin + shard.rank * part
        yield start, start + part, local_start
        begin, local_start = begin + block, local_start + part


def _read_and_check_finite(weights: PretrainedWeights, reads: Iterable[TensorRead]) -> None:
    """Read everything, then raise UsageError where values are not finite."""
    check = FiniteCheck(weights)
    _read(weights, reads, MappedFiles(), check)
    check.refuse_nonfinite_tensors()


def _read(
    weights: PretrainedWeights,
    reads: Iterable[TensorRead],
    files: MappedFiles,
    check: FiniteCheck | None = None,
) -> None:
    ordered = sorted(reads, key=lambda read: (read.entry.file, read.entry.start))
    for read in itertools.chain.from_iterable(map(_split_read, ordered)):
        read.target.copy_(_read_values(files, read, weights, check))


def _split_read(read: TensorRead) -> Iterator[TensorRead]:
    """Split a read into several, row by row, so that none makes a large copy."""
    rows, target = read.target.shape[:1], read.target
    if not rows or target.numel() * target.element_size() <= _CHUNK_BYTES:
        yield read
        return
    step = max(1, _CHUNK_BYTES * rows[0] // (target.numel() * target.element_size()))
    first, *rest = read.source
    begin, stride = first.start or 0, first.step or 1
    for row in range(0, rows[0], step):
        last = min(row + step, rows[0])
        source = (slice(begin + row * stride, begin + last * stride, stride), *rest)
        yield replace(read, source=source, target=target[row:last])


def _read_values(
    files: MappedFiles, read: TensorRead, weights: PretrainedWeights, check: FiniteCheck | None
) -> Tensor:
    """Return the numbers of a part of a tensor; those of FP8 and MXFP4 are multiplied by their scales."""
    entry, source = read.entry, read.source
    look = check.record_nonfinite_part if check else lambda *_: None
    if entry.dtype == MXFP4:
        count, columns, rows = entry.shape
        packed, scales = (
            files.read_bytes(name, weights.entries[name]).view(count, rows, columns // MX_SIZE, -1)[
                read.stack_entry
            ]
            for name in (f"{read.name}{MX_BLOCKS_SUFFIX}", f"{read.name}{MX_SCALES_SUFFIX}")
        )
        look(f"{read.name}{MX_SCALES_SUFFIX}", scales[source[0]])
        return dequantize_mxfp4(packed[source[0]], scales[source[0]].squeeze(-1))[:, source[1]]
    stored = files.read_tensor(read.name, entry)
    if read.stack_entry is not None:
        stored = stored[read.stack_entry].T if stored.ndim == 3 else stored[read.stack_entry]
    stored = stored[source]
    look(read.name, stored)
    if entry.dtype != FP8:
        return stored
    assert weights.scale_block is not None
    name = f"{read.name}{SCALE_SUFFIX}"
    scales = files.read_tensor(name, weights.entries[name])
    look(name, scales)
    first, second = (at.start or 0 for at in source)
    return dequantize_blocks(stored, scales.float(), weights.scale_block, (first, second))
