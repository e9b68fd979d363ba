"""Writes the weights of model chunks as Hugging Face has them, adapters as PEFT does, whatever the layout.

Tensor by tensor: the parts go to the rank that holds the first one, which writes it. So several ranks write,
files of their own, and none has more in memory than one whole tensor. Adapters are one file, by the first.
"""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from bundle import files, hub
from bundle.architectures import tensors
from bundle.architectures.adapters import CONFIG, WEIGHTS, config, pairs, published
from bundle.architectures.tensors import Tensors
from bundle.distributed.world import on_all_ranks, on_rank_0
from bundle.mcore.groups import Groups
from bundle.models import adapters, naming
from bundle.models.naming import Named
from bundle.models.published import Output, files_of, stored
from bundle.pretrained import one_of_each_kind, replacing, writing
from bundle.pretrained.writing import Numbers, Published, Stored
from bundle.recipe import Recipe

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Whole:
    """One tensor that is published, the ranks that hold its parts in order, and the one that writes it."""

    tensor: tensors.Tensor
    holders: tuple[int, ...]
    writer: int


def write(
    directory: Path,
    chunks: Sequence[torch.nn.Module],
    groups: Groups,
    table: Tensors,
    numbers: Numbers,
) -> dict[str, list[Stored]]:
    """Writes the safetensors of all that is published, adapters merged; returns what is in each.

    All ranks call it; the chunks stay as they are. Raises JobFailed on all ranks where one cannot write.
    """
    own: dict[str, Named] = {}
    for chunk in chunks:
        for named in (*naming.parameters(chunk, groups), *naming.buffers(chunk, groups)):
            own.setdefault(named.name, named)
    everything = _planned(list(table.published()), own)
    rank, writers = dist.get_rank(), sorted({whole.writer for whole in everything})
    of_writers = files_of(
        [each for whole in everything if whole.writer == writer for each in stored(whole.tensor, numbers)]
        for writer in writers
    )
    mine = dict(zip(writers, of_writers, strict=True)).get(rank, {})
    output = Output(directory, mine)
    likes = {_of_any(name): named for name, named in own.items()}
    for whole in everything:
        if rank not in (*whole.holders, whole.writer):
            continue
        name = whole.tensor.name
        held = own.get(name)
        if held is None:  # an entry of a stack, of which this rank has others
            like = likes[_of_any(name)]
            held = Named(name, torch.empty_like(like.parameter), like.shard)
        values = _gathered(adapters.merged(held, chunks), whole.holders, whole.writer)
        if values is not None:
            output.append(whole.tensor, values, numbers)
    on_all_ranks(output.close)
    return {name: share for of_one in of_writers for name, share in of_one.items()}


def export(
    directory: Path,
    recipe: Recipe,
    chunks: Sequence[torch.nn.Module],
    groups: Groups,
    ends: Iterable[int] = (),
) -> None:
    """Writes a directory that transformers opens, in the place of one that has that name. All ranks call it.

    What it generates ends with the tokens `ends` too, beside those that it was published with. Config,
    tokenizer and what else belongs to the model come from `model.path` and the recipe's tokenizer.
    Raises JobFailed on all ranks; what had the name before is there until the new one is whole.
    """
    model = Published.of(recipe)
    copies = on_rank_0(lambda: find_copies(directory, model))
    table = Tensors(recipe.architecture, groups.tp.size, copies)
    numbers: Numbers = "fp8" if recipe.checkpoint.export == "hf-fp8" else recipe.model.dtype
    with ExitStack() as whole:
        partial = on_rank_0(lambda: whole.enter_context(replacing.replacing(directory)))
        of_files = write(partial, chunks, groups, table, numbers)
        on_rank_0(lambda: writing.complete(partial, model, numbers, of_files, ends))
        on_rank_0(whole.close)


def find_copies(directory: Path, model: Published) -> list[str]:
    """Return the copies of tensors to write; log which tensors the directory leaves out.

    Those are what no family publishes, and what the model's source has and the model itself has not.
    """
    source, table = model.find_source_names(), Tensors(model.architecture)
    copies = table.find_copies(source)
    if any(not tensor.published for tensor in table):
        _log.warning(
            "%s leaves out the MTP layers: a model_type %s is published without any",
            directory,
            table.architecture.model_type,
        )
    written = {*copies, *(name for tensor in table for name in tensor.published)}
    if lost := [name for name in source if name not in written]:
        _log.warning(
            "%s leaves out %d tensors of %s, which are no part of the trained model: %s",
            directory,
            len(lost),
            model.source,
            ", ".join(one_of_each_kind(lost)),
        )
    return copies


def export_adapters(directory: Path, recipe: Recipe, chunks: Sequence[torch.nn.Module]) -> None:
    """Writes a directory that PEFT loads, in the place of one that has that name. All ranks call it.

    Raises JobFailed on all ranks; what had the name before is there until the new one is whole.
    """
    lora, rank = recipe.model.lora, dist.get_rank()
    assert lora is not None
    own = {named.name: named for named in adapters.every_matrix(chunks)}
    some = next(iter(own.values())).parameter  # every chunk has adapters: `plan` says where one has none
    model = Tensors(recipe.architecture)
    of_tensors = (pairs(tensor, lora.targets, lora.rank) for tensor in model)
    table = {matrix.name: matrix for of in of_tensors for pair in of if pair for matrix in pair}
    everything = _planned([published(name, table[name].shape, model.names) for name in sorted(table)], own)
    numbers = cast(Numbers, recipe.model.dtype)
    if both := sorted(_modules(table, of_experts=True) & _modules(table, of_experts=False)):
        _log.warning(
            "%s has %s of experts and of other layers: beside transformers 5 PEFT 0.21 leaves out those of"
            " other layers, and says nothing; use transformers 4, or merge them (checkpoint.export: hf)",
            directory,
            ", ".join(both),
        )
    with ExitStack() as whole:
        partial = on_rank_0(lambda: whole.enter_context(replacing.replacing(directory)))
        of_file = [each for matrix in everything for each in stored(matrix.tensor, numbers)]
        output = Output(partial, {WEIGHTS: of_file} if rank == 0 else {})
        for matrix in everything:
            if rank == 0 or rank in matrix.holders:
                name, parts = matrix.tensor.name, len(matrix.holders)
                named = own.get(name) or adapters.empty(table[name], 0, parts, some)
                values = _gathered(named, matrix.holders, 0)
                if values is not None:
                    output.append(matrix.tensor, values, numbers)
        on_all_ranks(output.close)
        said = config(lora.rank, lora.alpha, lora.dropout, lora.targets, hub.repository(recipe.model.path))
        on_rank_0(lambda: files.write_json(partial / CONFIG, said))
        on_rank_0(whole.close)


def _modules(names: Iterable[str], *, of_experts: bool) -> set[str]:
    """The last parts of the names of the modules that these matrices are beside."""
    return {name.rsplit(".", 3)[1] for name in names if tensors.is_expert(name) is of_experts}


def _planned(everything: Sequence[tensors.Tensor], own: Mapping[str, Named]) -> list[_Whole]:
    """Who holds which part of each of these tensors: of replicas those of the lowest ranks.

    The holder of the first part writes it; what becomes one published tensor, the first one's.
    """
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
    found: list[_Whole] = []
    writers: dict[tuple[str, ...], int] = {}
    for number, tensor in enumerate(everything):
        of_parts = tuple(holders[number][part] for part in sorted(holders[number]))
        found.append(_Whole(tensor, of_parts, writers.setdefault(tensor.published, of_parts[0])))
    return found


def _of_any(name: str) -> str:
    """The name of an expert's tensor without the expert's number."""
    return re.sub(r"(?<=local_experts\.)\d+", "#", name)


def _gathered(named: Named, holders: tuple[int, ...], writer: int) -> Tensor | None:
    """The whole tensor on the rank that writes it; None on those that have sent it their part.

    A writer that holds no part gives room for one.
    """
    rank, part = dist.get_rank(), named.parameter.detach().contiguous()
    if rank != writer:
        dist.send(part, writer)
        return None
    parts = [part if holder == rank else torch.empty_like(part) for holder in holders]
    for holder, received in zip(holders, parts, strict=True):
        if holder != rank:
            dist.recv(received, holder)
    return named.shard.joined(parts) if named.shard else parts[0]
