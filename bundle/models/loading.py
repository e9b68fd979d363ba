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
from bundle.architectures.published import NAMES
from bundle.architectures.tensors import Tensors
from bundle.distributed.world import on_all_ranks, on_rank_0
from bundle.errors import JobFailed
from bundle.mcore.groups import Groups
from bundle.models import naming
from bundle.models.finite import FiniteCheck
from bundle.models.mapped import Files
from bundle.models.naming import Named, Shard
from bundle.models.published import DTYPES, dequantized, of_four_bits
from bundle.pretrained import Entry, Pretrained
from bundle.pretrained.directory import FP8, MX_BLOCKS, MX_SCALES, MX_SIZE, MXFP4, SCALE
from bundle.recipe import Recipe

Slices = tuple[slice, ...]
_AT_ONCE = 2**23  # bytes: what is looked at is still near when it is copied


@dataclass(frozen=True)
class Read:
    """A part of a published tensor, and the part of a parameter that it becomes.

    `number`: of a stack's entry, whose rows and columns are the parameter's here; None: it is no stack.
    """

    name: str
    entry: Entry
    source: Slices
    target: Tensor
    number: int | None = None


def load(
    chunks: Sequence[torch.nn.Module], groups: Groups, weights: Pretrained, table: Tensors
) -> list[Named]:
    """Overwrites all that `table` says is published; returns what is not. All ranks call it.

    Raises UsageError for copies that differ from their original and for values that are not finite, JobFailed
    for files that cannot be read.
    """
    on_rank_0(lambda: pretrained.refuse_unequal(weights, table.copies()))
    published = {tensor.name: tensor for tensor in table if tensor.published}
    own = [
        named
        for chunk in chunks
        for named in (*naming.parameters(chunk, groups), *naming.buffers(chunk, groups))
    ]
    unpublished = [named for named in own if named.name not in published]
    if strangers := [named.name for named in unpublished if not named.name.startswith("mtp.")]:
        raise JobFailed(f"{strangers[0]}: no published tensor becomes this parameter of megatron-core")
    pairs = [(named, published[named.name]) for named in own if named.name in published]
    with torch.no_grad():
        reads = itertools.chain.from_iterable(_reads(weights, *pair) for pair in pairs)
        on_all_ranks(lambda: _read_finite(weights, reads))
    return unpublished


def load_adapters(matrices: Sequence[Named], recipe: Recipe) -> None:
    """Overwrites all of these A and B that the recipe's adapter holds, as PEFT writes it. All ranks call it.

    Raises UsageError for an adapter of another model, or with values that are not finite, JobFailed for a
    file that cannot be read.
    """

    def body() -> None:
        found = pretrained.adapter_of_recipe(recipe)
        if found is not None:
            names = NAMES[recipe.architecture.model_type]
            pairs = (
                (named, adapters.published(named.name, named.whole_shape(), names)) for named in matrices
            )
            # PEFT knows no MTP layers
            there = (pair for pair in pairs if pair[1].published[0] in found.entries)
            _read_finite(found, itertools.chain.from_iterable(_reads(found, *pair) for pair in there))

    with torch.no_grad():
        on_all_ranks(body)


def whole(
    weights: Pretrained, tensor: tensors.Tensor, dtype: torch.dtype, files: Files, check: FiniteCheck
) -> Tensor:
    """A tensor of the table, not to be written to: where the file has it as it is, that memory.

    `check` looks at what is read of it. Raises JobFailed for files that cannot be read.
    """
    if tensor.rule.kind in ("copy", "vocabulary") and tensor.stack is None:
        (name,) = tensor.published
        entry = weights.entries[name]
        if entry.shape == tensor.shape and DTYPES.get(entry.dtype) is dtype:
            stored = files.tensor(name, entry)
            check.add(name, stored)
            return stored
    target = torch.empty(tensor.shape, dtype=dtype)
    _read(weights, _reads(weights, Named(tensor.name, target, None), tensor), files, check)
    return target


def published(weights: Pretrained, name: str, files: Files) -> Tensor:
    """A published tensor, not to be written to, in the kind of numbers that it is stored in.

    In fp32 where that is FP8, and in bf16 where it is MXFP4.
    """
    entry = weights.entries[name]
    if entry.dtype not in (FP8, MXFP4):
        return files.tensor(name, entry)
    whole = slice(None), slice(None)
    if entry.dtype == FP8:
        target = torch.empty(entry.shape, dtype=torch.float32)
        reads = [Read(name, entry, whole, target)]
    else:
        target = torch.empty(entry.shape, dtype=torch.bfloat16)
        reads = [Read(name, entry, whole, part.T, number) for number, part in enumerate(target)]
    _read(weights, reads, files)
    return target


def _reads(weights: Pretrained, named: Named, tensor: tensors.Tensor) -> Iterator[Read]:
    """What makes this rank's part of a tensor; padding is filled at once."""
    if tuple(named.whole_shape()) != tensor.shape:
        raise JobFailed(
            f"{named.name} is {named.whole_shape()} in megatron-core, the table has {list(tensor.shape)}"
        )
    joined, local = tensor.rule.dim, named.parameter
    held = list(_held(named.shard, tensor.shape, joined))
    cut = joined if named.shard is None else named.shard.dim
    at = 0
    for piece in tensor.rule.pieces():
        name = tensor.published[piece.source]
        length, step = piece.length, piece.step
        for start, stop, place in held:
            source, target = ([slice(None)] * local.ndim for _ in range(2))
            source[joined], target[joined] = slice(piece.start, piece.stop, step), slice(at, at + length)
            if cut == joined:
                first, last = max(at, start), min(at + length, stop)
                if first >= last:
                    continue
                begin = piece.start + (first - at) * step
                source[joined] = slice(begin, begin + (last - first) * step, step)
                target[joined] = slice(place + first - start, place + last - start)
            else:
                source[cut], target[cut] = slice(start, stop), slice(place, place + stop - start)
            number = tensor.stack.entry if tensor.stack else None
            yield Read(name, weights.entries[name], tuple(source), local[tuple(target)], number)
        at += length
    for start, stop, place in held:
        if cut == joined and stop > at:
            first = max(at, start)
            local.narrow(joined, place + first - start, stop - first).zero_()


def _held(shard: Shard | None, shape: tuple[int, ...], dim: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop) of the ranges of the whole that this rank holds, and where each begins in its part."""
    if shard is None:
        yield 0, shape[dim], 0
        return
    begin = place = 0
    for block in shard.sizes(shape[shard.dim]):
        part = block // shard.size
        start = begin + shard.rank * part
        yield start, start + part, place
        begin, place = begin + block, place + part


def _read_finite(weights: Pretrained, reads: Iterable[Read]) -> None:
    """Raises UsageError, when all is read, where values are not finite."""
    check = FiniteCheck(weights)
    _read(weights, reads, Files(), check)
    check.conclude()


def _read(weights: Pretrained, reads: Iterable[Read], files: Files, check: FiniteCheck | None = None) -> None:
    ordered = sorted(reads, key=lambda read: (read.entry.file, read.entry.start))
    for read in itertools.chain.from_iterable(map(_in_pieces, ordered)):
        read.target.copy_(_values(files, read, weights, check))


def _in_pieces(read: Read) -> Iterator[Read]:
    """A read as several, row by row, of which none makes a large copy."""
    rows, target = read.target.shape[:1], read.target
    if not rows or target.numel() * target.element_size() <= _AT_ONCE:
        yield read
        return
    step = max(1, _AT_ONCE * rows[0] // (target.numel() * target.element_size()))
    first, *rest = read.source
    begin, every = first.start or 0, first.step or 1
    for row in range(0, rows[0], step):
        last = min(row + step, rows[0])
        source = (slice(begin + row * every, begin + last * every, every), *rest)
        yield replace(read, source=source, target=target[row:last])


def _values(files: Files, read: Read, weights: Pretrained, check: FiniteCheck | None) -> Tensor:
    """The numbers that a part of a tensor means: those of FP8 and MXFP4 are multiplied by their scales."""
    entry, source = read.entry, read.source
    look = check.add if check else lambda *_: None
    if entry.dtype == MXFP4:
        count, columns, rows = entry.shape
        packed, scales = (
            files.bytes(name, weights.entries[name]).view(count, rows, columns // MX_SIZE, -1)[read.number]
            for name in (f"{read.name}{MX_BLOCKS}", f"{read.name}{MX_SCALES}")
        )
        look(f"{read.name}{MX_SCALES}", scales[source[0]])
        return of_four_bits(packed[source[0]], scales[source[0]].squeeze(-1))[:, source[1]]
    stored = files.tensor(read.name, entry)
    if read.number is not None:
        stored = stored[read.number].T if stored.ndim == 3 else stored[read.number]
    stored = stored[source]
    look(read.name, stored)
    if entry.dtype != FP8:
        return stored
    assert weights.block is not None
    name = f"{read.name}{SCALE}"
    scales = files.tensor(name, weights.entries[name])
    look(name, scales)
    first, second = (at.start or 0 for at in source)
    return dequantized(stored, scales.float(), weights.block, (first, second))
