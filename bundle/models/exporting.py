"""Writes the weights of model chunks as Hugging Face has them, adapters as PEFT does, whatever the layout.

Each tensor is written by the rank that holds its first part (`models.streaming`), so that several ranks write
files of their own. Adapters are one file, by the first rank.
"""

import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from bundle import files, hub
from bundle.architectures import tensors
from bundle.architectures.adapters import CONFIG, WEIGHTS, config, pairs, published
from bundle.architectures.tensors import Tensors
from bundle.distributed.world import on_all_ranks, on_rank_0
from bundle.mcore.groups import Groups
from bundle.models import adapters
from bundle.models.published import Output, files_of, stored
from bundle.models.streaming import TensorStream
from bundle.pretrained import one_of_each_kind, replacing, writing
from bundle.pretrained.writing import Numbers, Published, Stored
from bundle.recipe import Recipe

_log = logging.getLogger(__name__)


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
    stream = TensorStream.from_chunks(chunks, groups, table)
    of_writers = files_of(
        [entry for route in stream.routes if route.owner == owner for entry in stored(route.tensor, numbers)]
        for owner in stream.owners
    )
    mine = dict(zip(stream.owners, of_writers, strict=True)).get(dist.get_rank(), {})
    output = Output(directory, mine)
    for tensor, full_tensor in stream.gather("owner"):
        output.append(tensor, full_tensor, numbers)
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
    model = Tensors(recipe.architecture)
    of_tensors = (pairs(tensor, lora.targets, lora.rank) for tensor in model)
    table = {matrix.name: matrix for of in of_tensors for pair in of if pair for matrix in pair}
    stream = TensorStream([published(name, table[name].shape, model.names) for name in sorted(table)], own)
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
        of_file = [entry for route in stream.routes for entry in stored(route.tensor, numbers)]
        output = Output(partial, {WEIGHTS: of_file} if rank == 0 else {})
        for matrix, full_matrix in stream.gather(0):
            output.append(matrix, full_matrix, numbers)
        on_all_ranks(output.close)
        said = config(lora.rank, lora.alpha, lora.dropout, lora.targets, hub.repository(recipe.model.path))
        on_rank_0(lambda: files.write_json(partial / CONFIG, said))
        on_rank_0(whole.close)


def _modules(names: Iterable[str], *, of_experts: bool) -> set[str]:
    """The last parts of the names of the modules that these matrices are beside."""
    return {name.rsplit(".", 3)[1] for name in names if tensors.is_expert(name) is of_experts}
