"""Whether a directory's tensors are those of a recipe's model or adapters: names, shapes, kinds of number."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bundle import files
from bundle.architectures import Architecture, adapters, from_config, read_config
from bundle.architectures.tensors import Tensors
from bundle.errors import UsageError, shown
from bundle.pretrained.directory import (
    FP8,
    INDEX,
    SCALE,
    SINGLE,
    Entry,
    Pretrained,
    blocks,
    quoted,
    summarized,
    tensors_of,
    weights_in,
)
from bundle.recipe import Recipe

FLOATS = ("F32", "BF16", "F16")
# What old files hold beside weights: constants that follow from the config.
_CONSTANTS = re.compile(r"\.rotary_emb\.inv_freq$")


def of_recipe(recipe: Recipe) -> Pretrained | None:
    """The weights that the recipe's model begins with; None: random ones.

    Raises UsageError with every reason why they cannot be loaded.
    """
    model = recipe.model
    if model.path is None or model.weights == "random":
        return None
    found = weights_in(Path(model.path))
    if found is None:
        if model.weights == "load":
            raise UsageError(f"{model.path}: model.weights says load, and there are no weights")
        return None
    return _matched(
        found,
        model.config,
        published(recipe),
        recipe.architecture.mtp_layers,
        "not the weights of this model (model.weights: random begins without them)",
    )


def of_directory(directory: Path, config: Mapping[str, Any], architecture: Architecture) -> Pretrained:
    """The weights of a directory, which must be those of a model with all of its published tensors.

    `config` is the directory's own; `architecture` says how many of its MTP layers there must be. Raises
    UsageError with every reason why they are not.
    """
    found = weights_in(directory)
    if found is None:
        raise UsageError(f"{directory}: there are no weights")
    table = Tensors(from_config(config, f"{directory / 'config.json'}"))
    otherwise = f"not the weights of this {architecture.model_type} model"
    return _matched(found, config, table, architecture.mtp_layers, otherwise)


def opened(directory: Path) -> Pretrained | None:
    """The weights of a directory, of whatever model they are; None where it is no Hugging Face directory.

    Raises UsageError with everything that cannot be read.
    """
    if not any(files.is_file(directory / name) for name in (SINGLE, INDEX)):
        return None
    found = weights_in(directory)
    assert found is not None
    config = read_config(directory) if files.is_file(directory / "config.json") else {}
    block, violations = _block_of(config)
    entries = found.entries
    tensors = {
        name: entry
        for name, entry in entries.items()
        if name.removesuffix(SCALE) not in entries.keys() - {name}
    }
    for name, entry in tensors.items():
        violations += _misfit(name, entry, entry.shape, entries.get(f"{name}{SCALE}"), block)
    if violations:
        raise UsageError(f"{directory}: cannot be compared", summarized(violations))
    return found._replace(block=block)


def _matched(
    found: Pretrained, config: Mapping[str, Any], table: Tensors, depths: int, otherwise: str
) -> Pretrained:
    block, violations = _block_of(config)
    found = found._replace(block=block)
    violations = violations or list(_against(found, table, depths))
    if violations:
        raise UsageError(f"{found.directory}: {otherwise}", summarized(violations))
    return found


def described(recipe: Recipe, found: Pretrained | None) -> str:
    """What the model begins with, for people; `found` is what `of_recipe` has returned."""
    if found is not None:
        return str(found)
    path, weights = recipe.model.path, recipe.model.weights
    why = f"{path} holds none" if path else "the recipe names no model.path"
    return f"random weights: {'model.weights says so' if weights == 'random' else why}"


def published(recipe: Recipe) -> Tensors:
    """The table of what the config says is published: with its own MTP layers, however many are trained."""
    return Tensors(from_config(recipe.model.config, "model.config"), recipe.parallel.tp)


def _against(found: Pretrained, table: Tensors, depths: int) -> Iterator[str]:
    """Everything that is wrong; `depths` MTP layers are trained, and those beyond them may be there."""
    entries, copies = found.entries, table.copies()
    expected: dict[str, tuple[int, ...]] = {}
    optional: set[str] = set(copies)
    for tensor in table:
        expected |= tensor.published_shapes()
        left_out = re.match(r"mtp\.layers\.(\d+)\.", tensor.name)
        if left_out and int(left_out[1]) >= depths:
            optional.update(tensor.published)
    expected |= {copy: expected[original] for copy, original in copies.items()}
    missing = [name for name in expected if name not in entries and name not in optional]
    yield from _alike(missing, "is missing")
    of_mtp = {name for tensor in table if tensor.name.startswith("mtp.") for name in tensor.published}
    if missing and of_mtp.issuperset(missing):
        yield "all that is missing is multi-token prediction: model.mtp.layers: 0 trains without it"
    scales = {f"{name}{SCALE}" for name in expected} if found.block else set()
    known = expected.keys() | scales
    extra = [name for name in entries if name not in known and not _CONSTANTS.search(name)]
    yield from _alike(extra, "is no tensor of this model")
    for name, shape in expected.items():
        if name in entries:
            yield from _misfit(name, entries[name], shape, entries.get(f"{name}{SCALE}"), found.block)


def _misfit(
    name: str, entry: Entry, shape: tuple[int, ...], scale: Entry | None, block: tuple[int, int] | None
) -> Iterator[str]:
    if entry.shape != shape:
        yield f"{name} is {list(entry.shape)}, the model's is {list(shape)}"
    elif entry.dtype == FP8:
        if block is None or scale is None or len(shape) != 2:
            yield f"{name} is {FP8} without {SCALE} and quantization_config.weight_block_size"
            return
        wanted = blocks(shape, block)
        if scale.shape != wanted or scale.dtype not in FLOATS:
            held = f"{scale.dtype} {list(scale.shape)}"
            yield f"{name}{SCALE} is {held}, must be {list(wanted)} numbers, one per block of {list(block)}"
    elif entry.dtype not in FLOATS:
        yield f"{name} is {entry.dtype}: only {', '.join(FLOATS)} and {FP8} are read"
    elif scale is not None:
        yield f"{name} is {entry.dtype} and has a {SCALE}, which only {FP8} needs"


def _alike(names: Iterable[str], reason: str) -> Iterator[str]:
    """One line for tensors whose names differ in numbers alone: layers and experts."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    for pattern, of in groups.items():
        more = f" (and {len(of) - 1} more like {quoted(pattern)})" if len(of) > 1 else ""
        yield f"{quoted(of[0])} {reason}{more}"


def _block_of(config: Mapping[str, Any]) -> tuple[tuple[int, int] | None, list[str]]:
    """The block of a published model's scales, and what is against how its weights are quantised."""
    said = config.get("quantization_config")
    if said is None:
        return None, []
    method = said.get("quant_method") if isinstance(said, dict) else None
    if not isinstance(said, dict) or method != "fp8":
        return None, [f"quantization_config.quant_method {shown(method)}: only fp8 with blocks is read"]
    block = said.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
        return (block[0], block[1]), []
    return None, [f"quantization_config.weight_block_size {shown(block)}: must be two sizes, as [128, 128]"]


def adapter_of_recipe(recipe: Recipe) -> Pretrained | None:
    """The matrices in model.lora.path; None: new ones. Raises UsageError with every reason against them."""
    asked = recipe.model.lora
    if asked is None or asked.path is None:
        return None
    directory = Path(asked.path)
    found = tensors_of(directory / adapters.WEIGHTS)
    if violations := list(_against_adapter(found, recipe)):
        raise UsageError(f"{directory}: not an adapter of this model", summarized(violations))
    return Pretrained(directory, found)


def _against_adapter(found: dict[str, Entry], recipe: Recipe) -> Iterator[str]:
    """Everything that is wrong; PEFT knows no MTP layers, and an adapter may be without theirs."""
    asked = recipe.model.lora
    assert asked is not None
    expected: dict[str, tuple[int, ...]] = {}
    optional: set[str] = set()
    for tensor in Tensors(recipe.architecture):
        for pair in filter(None, adapters.pairs(tensor, asked.targets, asked.rank)):
            of_pair = {f"{adapters.PREFIX}{matrix.name}": matrix.shape for matrix in pair}
            expected |= of_pair
            if tensor.name.startswith("mtp."):
                optional.update(of_pair)
    for name, shape in expected.items():
        if name not in found:
            if name not in optional:
                yield f"{name} is missing"
        elif found[name].shape != shape:
            yield f"{name} is {list(found[name].shape)}, the model's is {list(shape)}"
        elif found[name].dtype not in FLOATS:
            yield f"{name} holds {found[name].dtype}: only {', '.join(FLOATS)} are read"
    yield from (f"{quoted(name)} belongs to none of the targets" for name in found if name not in expected)
