"""Writes the weights of model chunks as Hugging Face has them, whatever the layout that holds them.

Tensor by tensor: the parts go to the rank that holds the first one, which writes it. So several ranks write,
files of their own, and none has more in memory than one whole tensor.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bundle.architectures import tensors
from bundle.architectures.tensors import Tensors
from bundle.distributed.world import on_all_ranks, on_rank_0
from bundle.errors import JobFailed
from bundle.mcore.gpt import DTYPES
from bundle.mcore.groups import Groups
from bundle.models import naming
from bundle.models.naming import Named
from bundle.pretrained import writing
from bundle.pretrained.writing import File, Stored, names_of_files, shares
from bundle.recipe import Recipe

_SPELLED = {torch.bfloat16: "BF16", torch.float32: "F32"}
_DTYPES = {spelled: dtype for dtype, spelled in _SPELLED.items()}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Whole:
    """One tensor that is published: the ranks that hold its parts in order, of which the first writes it."""

    tensor: tensors.Tensor
    holders: tuple[int, ...]


def write(
    directory: Path,
    chunks: Sequence[torch.nn.Module],
    groups: Groups,
    table: Tensors,
    dtype: torch.dtype,
) -> dict[str, list[Stored]]:
    """Writes the safetensors of all that is published; returns what is in each. All ranks call it.

    `dtype` is that of the weights; the biases that steer the choice of experts are stored in fp32, in which
    they are trained. Raises JobFailed on all ranks where one cannot write.
    """
    own: dict[str, Named] = {}
    for chunk in chunks:
        for named in (*naming.parameters(chunk, groups), *naming.buffers(chunk, groups)):
            own.setdefault(named.name, named)
    everything = _planned(table, own)
    rank, mine = dist.get_rank(), {}
    of_files: dict[str, list[Stored]] = {}
    planned = [
        (writer, share)
        for writer in sorted({whole.holders[0] for whole in everything})
        for share in shares(
            stored
            for whole in everything
            if whole.holders[0] == writer
            for stored in _stored(whole.tensor, dtype)
        )
    ]
    for name, (writer, share) in zip(names_of_files(len(planned)), planned, strict=True):
        of_files[name] = share
        if writer == rank:
            mine[name] = share
    output = _Output(directory, mine)
    for whole in everything:
        if rank not in whole.holders:
            continue
        values = _gathered(own[whole.tensor.name], whole.holders, rank)
        if values is not None:
            parts = _published(whole.tensor, values)
            for stored, part in zip(_stored(whole.tensor, dtype), parts, strict=True):
                output.append(stored, part)
    on_all_ranks(output.close)
    return of_files


def export(directory: Path, recipe: Recipe, chunks: Sequence[torch.nn.Module], groups: Groups) -> None:
    """Writes a directory that transformers opens, in the place of one that has that name. All ranks call it.

    Config, tokenizer and what else belongs to the model come from `model.path` and the recipe's tokenizer.
    Raises JobFailed on all ranks; what had the name before is there until the new one is whole.
    """
    table = Tensors(recipe.architecture, groups.tp.size)
    if any(not tensor.published for tensor in table):
        _log.warning(
            "%s leaves out the MTP layers: a model_type %s is published without any",
            directory,
            recipe.architecture.model_type,
        )
    with ExitStack() as whole:
        partial = on_rank_0(lambda: whole.enter_context(writing.replacing(directory)))
        of_files = write(partial, chunks, groups, table, DTYPES[recipe.model.dtype])
        on_rank_0(lambda: _complete(partial, recipe, of_files))
        on_rank_0(whole.close)


def _complete(directory: Path, recipe: Recipe, of_files: dict[str, list[Stored]]) -> None:
    writing.write_index(directory, of_files)
    writing.write_config(directory, recipe)
    kind, _, tokenizer = recipe.data.tokenizer.partition(":")
    sources = [recipe.model.path, tokenizer if kind == "hf" else None]
    writing.copy_belongings([Path(source) for source in sources if source], directory)


def _planned(table: Tensors, own: dict[str, Named]) -> list[_Whole]:
    """Every published tensor, and who holds which part: of replicas those of the lowest ranks."""
    everything = [tensor for tensor in table if tensor.published]
    held = [
        (number, named.shard.rank if named.shard else 0)
        for number, tensor in enumerate(everything)
        if (named := own.get(tensor.name)) is not None
    ]
    seen: list[list[tuple[int, int]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(seen, held)
    holders: dict[int, dict[int, int]] = {}
    for rank, of_rank in enumerate(seen):
        for number, part in of_rank:
            holders.setdefault(number, {}).setdefault(part, rank)
    return [
        _Whole(tensor, tuple(holders[number][part] for part in sorted(holders[number])))
        for number, tensor in enumerate(everything)
    ]


def _stored(tensor: tensors.Tensor, dtype: torch.dtype) -> Iterator[Stored]:
    kept = torch.float32 if tensors.is_buffer(tensor.name) else dtype
    return (Stored(name, _SPELLED[kept], shape) for name, shape in tensor.published_shapes())


def _gathered(named: Named, holders: tuple[int, ...], rank: int) -> Tensor | None:
    """The whole tensor on the rank that writes it; None on those that have sent it their part."""
    part = named.parameter.detach().contiguous()
    if rank != holders[0]:
        dist.send(part, holders[0])
        return None
    parts = [part]
    for other in holders[1:]:
        parts.append(torch.empty_like(part))
        dist.recv(parts[-1], other)
    return named.shard.joined(parts) if named.shard else part


def _published(tensor: tensors.Tensor, whole: Tensor) -> Iterator[Tensor]:
    """The published tensors that one of ours is made of, in their order."""
    rule = tensor.rule
    pieces, at = [], 0
    for piece in rule.pieces():
        length = piece.stop - piece.start
        pieces.append((piece, whole.narrow(rule.dim, at, length)))
        at += length
    for source in range(len(tensor.published)):
        of_it = {piece.start: part for piece, part in pieces if piece.source == source}
        yield torch.cat([of_it[start] for start in sorted(of_it)], rule.dim)


class _Output:
    """This rank's files, written one after the other; an error waits until the others have sent theirs."""

    def __init__(self, directory: Path, of: dict[str, list[Stored]]) -> None:
        self._waiting = [(directory / name, list(share)) for name, share in of.items()]
        self._file: File | None = None
        self._left: list[Stored] = []
        self._error: JobFailed | None = None

    def append(self, stored: Stored, values: Tensor) -> None:
        if self._error is not None:
            return
        with self._remembering():
            if not self._left:
                self._finish()
                path, self._left = self._waiting.pop(0)
                self._file = File(path, self._left)
            assert self._file is not None and self._left.pop(0) == stored
            flat = values.to("cpu", _DTYPES[stored.dtype]).contiguous().flatten()
            self._file.append(memoryview(flat.view(torch.uint8).numpy()))

    def close(self) -> None:
        """Raises what went wrong on the way."""
        with self._remembering():
            self._finish()
        if self._error is not None:
            raise self._error

    def _finish(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    @contextmanager
    def _remembering(self) -> Iterator[None]:
        try:
            yield
        except JobFailed as error:
            self._error = error
            if self._file is not None:
                self._file.discard()
                self._file = None
