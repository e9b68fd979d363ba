"""Writes the weights of model chunks as Hugging Face has them, whatever the layout that holds them.

Tensor by tensor: the parts go to the rank that holds the first one, which writes it. So several ranks write,
files of their own, and none has more in memory than one whole tensor.
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bundle.architectures import tensors
from bundle.architectures.tensors import Tensors
from bundle.distributed.world import on_all_ranks, on_rank_0
from bundle.mcore.groups import Groups
from bundle.models import adapters, naming
from bundle.models.naming import Named
from bundle.models.published import Output, files_of, stored
from bundle.pretrained import writing
from bundle.pretrained.writing import Numbers, Published, Stored
from bundle.recipe import Recipe

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
    numbers: Numbers,
) -> dict[str, list[Stored]]:
    """Writes the safetensors of all that is published, adapters merged; returns what is in each.

    All ranks call it; the chunks stay as they are. Raises JobFailed on all ranks where one cannot write.
    """
    own: dict[str, Named] = {}
    for chunk in chunks:
        for named in (*naming.parameters(chunk, groups), *naming.buffers(chunk, groups)):
            own.setdefault(named.name, named)
    everything = _planned(table, own)
    rank, writers = dist.get_rank(), sorted({whole.holders[0] for whole in everything})
    of_writers = files_of(
        [each for whole in everything if whole.holders[0] == writer for each in stored(whole.tensor, numbers)]
        for writer in writers
    )
    mine = dict(zip(writers, of_writers, strict=True)).get(rank, {})
    output = Output(directory, mine)
    for whole in everything:
        if rank not in whole.holders:
            continue
        values = _gathered(adapters.merged(own[whole.tensor.name], chunks), whole.holders, rank)
        if values is not None:
            output.append(whole.tensor, values, numbers)
    on_all_ranks(output.close)
    return {name: share for of_one in of_writers for name, share in of_one.items()}


def export(directory: Path, recipe: Recipe, chunks: Sequence[torch.nn.Module], groups: Groups) -> None:
    """Writes a directory that transformers opens, in the place of one that has that name. All ranks call it.

    Config, tokenizer and what else belongs to the model come from `model.path` and the recipe's tokenizer.
    Raises JobFailed on all ranks; what had the name before is there until the new one is whole.
    """
    table = Tensors(recipe.architecture, groups.tp.size)
    numbers: Numbers = "fp8" if recipe.checkpoint.export == "hf-fp8" else recipe.model.dtype
    warn_of_left_out(directory, table)
    with ExitStack() as whole:
        partial = on_rank_0(lambda: whole.enter_context(writing.replacing(directory)))
        of_files = write(partial, chunks, groups, table, numbers)
        on_rank_0(lambda: writing.complete(partial, Published.of(recipe), numbers, of_files))
        on_rank_0(whole.close)


def warn_of_left_out(directory: Path, table: Tensors) -> None:
    """Says which tensors no directory of the family has a name for."""
    if any(not tensor.published for tensor in table):
        _log.warning(
            "%s leaves out the MTP layers: a model_type %s is published without any",
            directory,
            table.architecture.model_type,
        )


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
