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
from bundle.architectures.adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    build_adapter_config,
    build_adapter_pairs,
    build_adapter_tensor,
)
from bundle.architectures.tensors import Tensors
from bundle.distributed.world import run_and_all_gather_results, run_on_rank_0
from bundle.mcore.groups import Groups
from bundle.models import adapters
from bundle.models.publishing import PublishedWriter, list_stored_tensors, plan_files_by_writer
from bundle.models.streaming import TensorStream
from bundle.pretrained import format_similar_name_examples, replacing, writing
from bundle.pretrained.writing import OutputTensorHeader, PublishedModel, WeightFormat
from bundle.recipe import Recipe

_log = logging.getLogger(__name__)


def write(
    directory: Path,
    chunks: Sequence[torch.nn.Module],
    groups: Groups,
    table: Tensors,
    numbers: WeightFormat,
) -> dict[str, list[OutputTensorHeader]]:
    """Write the safetensors of all that is published, adapters merged; return the tensors in each file.

    All ranks call it; the chunks stay as they are. Raises JobFailed on all ranks where one cannot write.
    """
    stream = TensorStream.from_chunks(chunks, groups, table)
    planned_files = plan_files_by_writer(
        [
            entry
            for route in stream.routes
            if route.owner == owner
            for entry in list_stored_tensors(route.tensor, numbers)
        ]
        for owner in stream.distinct_owner_ranks
    )
    mine = dict(zip(stream.distinct_owner_ranks, planned_files, strict=True)).get(dist.get_rank(), {})
    output = PublishedWriter(directory, mine)
    for tensor, full_tensor in stream.gather("owner"):
        output.append(tensor, full_tensor, numbers)
    run_and_all_gather_results(output.close_and_raise_error)
    return {name: share for writer_files in planned_files for name, share in writer_files.items()}


def export(
    directory: Path,
    recipe: Recipe,
    chunks: Sequence[torch.nn.Module],
    groups: Groups,
    eos_token_ids: Iterable[int] = (),
) -> None:
    """Write a directory that transformers opens, and replace the one that has that name. All ranks call it.

    Generation ends with the tokens `eos_token_ids` too, beside those of the published model. Config,
    tokenizer and the model's other files come from `model.path` and the recipe's tokenizer. Raises JobFailed
    on all ranks. The previous directory stays until the new one is complete.
    """
    model = PublishedModel.from_recipe(recipe)
    copies = run_on_rank_0(lambda: list_tensor_copies_to_write(directory, model))
    table = Tensors(recipe.architecture, groups.tp.size, copies)
    numbers: WeightFormat = "fp8" if recipe.checkpoint.export == "hf-fp8" else recipe.model.dtype
    with ExitStack() as stack:
        partial = run_on_rank_0(lambda: stack.enter_context(replacing.replace_directory(directory)))
        planned_files = write(partial, chunks, groups, table, numbers)
        run_on_rank_0(
            lambda: writing.write_remaining_files(partial, model, numbers, planned_files, eos_token_ids)
        )
        run_on_rank_0(stack.close)


def list_tensor_copies_to_write(directory: Path, model: PublishedModel) -> list[str]:
    """Return the copies of tensors to write; log which tensors the directory leaves out.

    Those are what no family publishes, and what the model's source has and the model itself has not.
    """
    source, table = model.read_source_tensor_names(), Tensors(model.architecture)
    copies = table.list_copies_matching_source(source)
    if any(not tensor.published_names for tensor in table):
        _log.warning(
            "%s leaves out the MTP layers, because model_type %s is published without MTP layers",
            directory,
            table.architecture.model_type,
        )
    written = {*copies, *(name for tensor in table for name in tensor.published_names)}
    if lost := [name for name in source if name not in written]:
        _log.warning(
            "%s leaves out %d tensors of %s, which are not part of the trained model: %s",
            directory,
            len(lost),
            model.source,
            ", ".join(format_similar_name_examples(lost)),
        )
    return copies


def export_adapters(directory: Path, recipe: Recipe, chunks: Sequence[torch.nn.Module]) -> None:
    """Write a directory that PEFT loads, and replace the one that has that name. All ranks call it.

    Raises JobFailed on all ranks. The previous directory stays until the new one is complete.
    """
    lora, rank = recipe.model.lora, dist.get_rank()
    assert lora is not None
    local_tensors = {named.name: named for named in adapters.list_matrices(chunks)}
    model = Tensors(recipe.architecture)
    all_pairs = (
        pair
        for tensor in model
        for pair in build_adapter_pairs(tensor, lora.targets, lora.rank, use_dora=lora.use_dora)
    )
    table = {
        matrix.name: matrix for pair in filter(None, all_pairs) for matrix in pair.list_trained_matrices()
    }
    stream = TensorStream(
        [build_adapter_tensor(name, table[name].shape, model.names) for name in sorted(table)], local_tensors
    )
    numbers = cast(WeightFormat, recipe.model.dtype)
    if ambiguous := sorted(
        _list_published_leaf_names(table, is_expert=True) & _list_published_leaf_names(table, is_expert=False)
    ):
        _log.warning(
            "%s has %s of experts and of other layers: with transformers 5, PEFT 0.21 silently leaves out"
            " those of other layers; use transformers 4, or merge them (checkpoint.export: hf)",
            directory,
            ", ".join(ambiguous),
        )
    with ExitStack() as stack:
        partial = run_on_rank_0(lambda: stack.enter_context(replacing.replace_directory(directory)))
        entries = [entry for route in stream.routes for entry in list_stored_tensors(route.tensor, numbers)]
        output = PublishedWriter(partial, {WEIGHTS_FILE: entries} if rank == 0 else {})
        for matrix, full_matrix in stream.gather(0):
            output.append(matrix, full_matrix, numbers)
        run_and_all_gather_results(output.close_and_raise_error)
        peft_config = build_adapter_config(lora.model_dump(), hub.strip_revision(recipe.model.path))
        run_on_rank_0(lambda: files.write_json(partial / CONFIG_FILE, peft_config))
        run_on_rank_0(stack.close)


def _list_published_leaf_names(names: Iterable[str], *, is_expert: bool) -> set[str]:
    """Return the last parts of the names of the modules that have these matrices."""
    return {name.rsplit(".", 3)[1] for name in names if tensors.is_expert(name) is is_expert}
