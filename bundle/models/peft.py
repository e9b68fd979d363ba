"""Adapters as a directory of PEFT: each rank reads its slices, and the first one writes matrix by matrix."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bundle import files, pretrained
from bundle.architectures import adapters, tensors
from bundle.architectures.tensors import Rule, is_expert
from bundle.distributed.world import on_all_ranks, on_rank_0
from bundle.errors import JobFailed
from bundle.models.adapters import every_matrix
from bundle.models.naming import Named
from bundle.models.published import Output, stored
from bundle.pretrained import writing
from bundle.pretrained.writing import Numbers
from bundle.recipe import Recipe

_log = logging.getLogger(__name__)


def load(matrices: Sequence[Named], recipe: Recipe) -> None:
    """Overwrites all of these A and B that the recipe's adapter holds. All ranks call it.

    Raises UsageError for an adapter of another model, JobFailed for a file that cannot be read.
    """
    on_all_ranks(lambda: _load(matrices, recipe))


def _load(matrices: Sequence[Named], recipe: Recipe) -> None:
    found = pretrained.adapter_of_recipe(recipe)
    if found is None:
        return
    path = found.directory / adapters.WEIGHTS
    try:
        with torch.no_grad(), safe_open(path, framework="pt") as file:
            for named in matrices:
                name = f"{adapters.PREFIX}{named.name}"
                if name not in found.entries:  # of an MTP layer, which PEFT does not know
                    continue
                part = [slice(None)] * 2
                if (shard := named.shard) is not None:
                    size = named.parameter.shape[shard.dim]
                    part[shard.dim] = slice(shard.rank * size, (shard.rank + 1) * size)
                named.parameter.copy_(file.get_slice(name)[tuple(part)])
    except (OSError, SafetensorError) as error:
        raise JobFailed(f"{path}: cannot be read any more: {error}") from error


def export(directory: Path, recipe: Recipe, chunks: Sequence[torch.nn.Module]) -> None:
    """Writes a directory that PEFT loads, in the place of one that has that name. All ranks call it.

    Raises JobFailed on all ranks; what had the name before is there until the new one is whole.
    """
    lora, rank = recipe.model.lora, dist.get_rank()
    assert lora is not None
    own = {named.name: named for named in every_matrix(chunks)}
    some = next(iter(own.values())).parameter  # every chunk has adapters: `plan` says where one has none
    parts, numbers = _parts(own), cast(Numbers, recipe.model.dtype)
    matrices = [
        tensors.Tensor(name, of.shape, (f"{adapters.PREFIX}{name}",), Rule("copy", of.shape[:1]))
        for name, of in parts.items()
    ]
    said = adapters.config(lora.rank, lora.alpha, lora.targets, recipe.model.path)
    if both := sorted(_modules(parts, of_experts=True) & _modules(parts, of_experts=False)):
        _log.warning(
            "%s has %s of experts and of other layers: beside transformers 5 PEFT 0.21 leaves out those of"
            " other layers, and says nothing; use transformers 4, or merge them (checkpoint.export: hf)",
            directory,
            ", ".join(both),
        )
    with ExitStack() as whole:
        partial = on_rank_0(lambda: whole.enter_context(writing.replacing(directory)))
        everything = [each for matrix in matrices for each in stored(matrix, numbers)]
        output = Output(partial, {adapters.WEIGHTS: everything} if rank == 0 else {})
        for matrix in matrices:
            of, named = parts[matrix.name], own.get(matrix.name)
            if rank == 0:
                output.append(matrix, _received(of, named, some), numbers)
            elif named is not None and rank in of.holders:
                dist.send(named.parameter.detach().contiguous(), 0)
        on_all_ranks(output.close)
        on_rank_0(lambda: files.write_json(partial / adapters.CONFIG, said))
        on_rank_0(whole.close)


def _modules(names: Iterable[str], *, of_experts: bool) -> set[str]:
    """The last parts of the names of the modules that these matrices are beside."""
    return {name.rsplit(".", 3)[1] for name in names if is_expert(name) is of_experts}


class _Parts(NamedTuple):
    """A whole matrix: `holders` have its parts along `dim` in their order, each whoever comes first."""

    shape: tuple[int, ...]
    dim: int
    holders: tuple[int, ...]


def _parts(own: Mapping[str, Named]) -> dict[str, _Parts]:
    """Every matrix of all ranks, sorted by its name."""
    mine = {
        name: (tuple(named.whole_shape()), *((shard.dim, shard.rank) if (shard := named.shard) else (0, 0)))
        for name, named in own.items()
    }
    seen: list[dict[str, tuple[tuple[int, ...], int, int]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(seen, mine)
    found: dict[str, tuple[tuple[int, ...], int, dict[int, int]]] = {}
    for rank, of_rank in enumerate(seen):
        for name, (shape, dim, part) in of_rank.items():
            found.setdefault(name, (shape, dim, {}))[2].setdefault(part, rank)
    return {
        name: _Parts(shape, dim, tuple(ranks[part] for part in sorted(ranks)))
        for name, (shape, dim, ranks) in sorted(found.items())
    }


def _received(of: _Parts, own: Named | None, like: Tensor) -> Tensor:
    """The whole matrix, on the first rank, from those that send their parts."""
    shape = list(of.shape)
    shape[of.dim] //= len(of.holders)
    parts = []
    for holder in of.holders:
        if holder == 0:
            assert own is not None
            parts.append(own.parameter.detach())
        else:
            parts.append(like.new_empty(shape))
            dist.recv(parts[-1], holder)
    return torch.cat(parts, of.dim)
