"""Whether a directory's tensors are those of a recipe's model or adapters: names, shapes, kinds of number."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bundle import files, hub
from bundle.architectures import Architecture, adapters, from_config, read_config
from bundle.architectures.contents import has_weights
from bundle.architectures.identity import changes, noted
from bundle.architectures.published import NAMES
from bundle.architectures.tensors import Tensors
from bundle.errors import UsageError, shown
from bundle.pretrained.directory import (
    FP8,
    MX_BLOCKS,
    MX_SCALES,
    MX_SIZE,
    MXFP4,
    SCALE,
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
# Classes whose head gives labels or a reward, as transformers and reward models call them.
_ANOTHER_HEAD = re.compile(r"For(?!CausalLM|ConditionalGeneration)[A-Z]\w*$|RewardModel")
_COMPARED = 2**24  # bytes at once
# What old files hold beside weights: constants that follow from the config.
_CONSTANTS = re.compile(r"\.rotary_emb\.inv_freq$")


def of_recipe(recipe: Recipe) -> Pretrained | None:
    """The weights that the recipe's model begins with; None: random ones.

    Raises UsageError with every reason why they cannot be loaded.
    """
    model = recipe.model
    if model.path is None or model.weights == "random":
        return None
    directory = Path(hub.local_path(model.path))
    _refuse_another_head(directory, model.config, NAMES[recipe.architecture.model_type].architecture)
    found = weights_in(directory)
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
    _refuse_another_head(directory, config, NAMES[architecture.model_type].architecture)
    found = weights_in(directory)
    if found is None:
        raise UsageError(f"{directory}: there are no weights")
    table = Tensors(from_config(config, f"{directory / 'config.json'}"))
    otherwise = f"not the weights of this {architecture.model_type} model"
    without = "--mtp-layers 0 leaves it out"
    return _matched(found, config, table, architecture.mtp_layers, otherwise, without)


def of_another_directory(recipe: Recipe, directory: Path) -> Pretrained:
    """The weights of a directory, which must be those that the recipe's model could begin with.

    Raises UsageError with every reason why they cannot be loaded, and with what its config says of another
    model. How many layers for MTP that names is its own matter.
    """
    config = read_config(directory)
    theirs = from_config(config, str(directory / "config.json"))
    _refuse_another_head(directory, config, NAMES[theirs.model_type].architecture)
    found = weights_in(directory)
    if found is None:
        raise UsageError(f"{directory}: there are no weights")
    own = replace(from_config(recipe.model.config, "model.config"), mtp_layers=theirs.mtp_layers)
    return _matched(
        found,
        config,
        published(recipe),
        recipe.architecture.mtp_layers,
        "not the weights of the recipe's model",
        others=changes(noted(theirs), own, "its config.json"),
    )


def _refuse_another_head(directory: Path, config: Mapping[str, Any], published: str) -> None:
    """Raises UsageError where a config names a class without a language model's head, as `published` has."""
    named = config.get("architectures")
    for name in named if isinstance(named, list) else ():
        if isinstance(name, str) and _ANOTHER_HEAD.search(name):
            raise UsageError(
                f"{directory}: architectures: {quoted(name)} has another head than a language model. Name a"
                f" checkpoint of {published}, or begin without its weights (model.weights: random)"
            )


def opened(directory: Path) -> Pretrained | None:
    """The weights of a directory, of whatever model they are; None where it is no Hugging Face directory.

    Raises UsageError with everything that cannot be read.
    """
    if not has_weights(directory):
        return None
    found = weights_in(directory)
    assert found is not None
    config = read_config(directory) if files.is_file(directory / "config.json") else {}
    found, violations = _with_quantization(found, config)
    found = _as_published(found, config)
    entries = found.entries
    beside = {f"{name}{suffix}" for name in entries for suffix in (SCALE, *_beside(entries[name]))}
    for name, entry in entries.items():
        if name not in beside:
            violations += _misfit(name, entry, entry.shape, entries.get(f"{name}{SCALE}"), found.block)
    if violations:
        raise UsageError(f"{directory}: cannot be compared", summarized(violations))
    return found


def _as_published(found: Pretrained, config: Mapping[str, Any]) -> Pretrained:
    """The weights with all stacks as they are published, where the config is of a family that we know."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in NAMES or not NAMES[family].either_way:
        return found
    with suppress(UsageError):  # of whatever else it asks for there is no need here
        return _turned(found, Tensors(from_config(config)))
    return found


def _matched(
    found: Pretrained,
    config: Mapping[str, Any],
    table: Tensors,
    depths: int,
    otherwise: str,
    without_mtp: str = "model.mtp.layers: 0 trains without it",
    others: Iterable[str] = (),
) -> Pretrained:
    found, violations = _with_quantization(found, config)
    if table.names.either_way:
        found = _turned(found, table)
    violations = [*others, *(violations or _against(found, table, depths, without_mtp))]
    if violations:
        raise UsageError(f"{found.directory}: {otherwise}", summarized(violations))
    return found


def read_published_names(directory: Path) -> Iterator[str]:
    """Yield the names of a directory's weights; of quantised ones once, whatever lies beside their numbers.

    There are none where the directory holds no weights that can be read.
    """
    with suppress(UsageError):
        found = weights_in(directory)
        for name in found.entries if found else ():
            if not name.endswith((SCALE, MX_SCALES)) and not _CONSTANTS.search(name):
                yield name.removesuffix(MX_BLOCKS)


def refuse_unequal(weights: Pretrained, copies: Mapping[str, str]) -> None:
    """Raises UsageError for copies (by name: the original's) that differ from their original."""
    found = weights.entries
    unequal = [
        f"{copy} is published once more as a copy of {original}, and differs from it"
        for copy, original in copies.items()
        if copy in found and not _equal(found[copy], found[original])
    ]
    if unequal:
        raise UsageError(
            f"{weights.directory}: megatron-core has one tensor where these weights have two. Leave out MTP"
            " layers (model.mtp.layers: 0, --mtp-layers 0); for lm_head set tie_word_embeddings: false",
            unequal,
        )


def _equal(a: Entry, b: Entry) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    with a.file.open("rb") as one, b.file.open("rb") as other:
        one.seek(a.start)
        other.seek(b.start)
        left = a.stop - a.start
        while left:
            size = min(left, _COMPARED)
            if one.read(size) != other.read(size):
                return False
            left -= size
    return True


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


def _against(found: Pretrained, table: Tensors, depths: int, without_mtp: str) -> Iterator[str]:
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
    yield from (f"{name} is missing{more}" for name, more in _kinds(missing))
    of_mtp = {name for tensor in table if tensor.name.startswith("mtp.") for name in tensor.published}
    if missing and of_mtp.issuperset(missing):
        yield f"all that is missing is multi-token prediction: {without_mtp}"
    known = set(expected)
    for name in expected:
        known |= {f"{name}{SCALE}"} if found.block else set()
        known |= {f"{name}{suffix}" for suffix in _beside(entries.get(name))}
    extra = [name for name in entries if name not in known and not _CONSTANTS.search(name)]
    if unread := table.names.left_out:
        extra = [name for name in extra if not name.startswith(unread)]
    yield from (f"{name} is no tensor of this model{more}" for name, more in _kinds(extra))
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
    elif entry.dtype not in (*FLOATS, MXFP4):
        yield f"{name} is {entry.dtype}: only {', '.join(FLOATS)}, {FP8} and {MXFP4} are read"
    elif scale is not None:
        yield f"{name} is {entry.dtype} and has a {SCALE}, which only {FP8} needs"


def _turned(found: Pretrained, table: Tensors) -> Pretrained:
    """The weights with all stacks as they are published, if they lie turned in these files.

    A square matrix does not say it; of a layer's two at most one is square.
    """
    shapes = {
        name: shape
        for of in table
        if of.stack
        for name, shape in of.published_shapes()
        if name in found.entries
    }
    stacks = {name: found.entries[name]._replace(shape=shape, turned=True) for name, shape in shapes.items()}
    fitting = [name for name, entry in stacks.items() if entry.as_stored == found.entries[name]]
    if not any(shapes[name] != found.entries[name].shape for name in fitting):
        return found
    return found._replace(entries={**found.entries, **{name: stacks[name] for name in fitting}})


def one_of_each_kind(names: Iterable[str]) -> Iterator[str]:
    """Yield one of the names that differ in numbers alone, and how many more there are."""
    yield from (f"{name}{more}" for name, more in _kinds(names))


def _kinds(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The first of the names that differ in numbers alone (layers, experts), and how many more there are."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    for pattern, of in groups.items():
        more = f" (and {len(of) - 1} more like {quoted(pattern)})" if len(of) > 1 else ""
        yield quoted(of[0]), more


def _with_quantization(found: Pretrained, config: Mapping[str, Any]) -> tuple[Pretrained, list[str]]:
    """The weights with what is known of how they are quantised, and what is against that."""
    said = config.get("quantization_config")
    if said is None:
        return found, []
    method = said.get("quant_method") if isinstance(said, dict) else None
    if method == "mxfp4":
        stacks, violations = _stacks_of_mxfp4(found.entries)
        return found._replace(entries={**found.entries, **stacks}), violations
    if not isinstance(said, dict) or method != "fp8":
        key = f"quantization_config.quant_method {shown(method)}"
        return found, [f"{key}: only mxfp4, and fp8 with blocks, are read"]
    block = said.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
        return found._replace(block=(block[0], block[1])), []
    return found, [f"quantization_config.weight_block_size {shown(block)}: must be two sizes, as [128, 128]"]


def _stacks_of_mxfp4(entries: Mapping[str, Entry]) -> tuple[dict[str, Entry], list[str]]:
    """What pairs of blocks and scales are together, by its own name, and which of these do not fit."""
    stacks, violations = {}, []
    for stored, entry in entries.items():
        if not stored.endswith(MX_BLOCKS):
            continue
        name, bytes_of_block = stored.removesuffix(MX_BLOCKS), MX_SIZE // 2
        scales = entries.get(f"{name}{MX_SCALES}")
        if scales is None or scales.shape != entry.shape[:-1] or len(entry.shape) != 4:
            held = "missing" if scales is None else f"{list(scales.shape)}"
            violations.append(
                f"{quoted(name)}{MX_SCALES} is {held}: {MXFP4} blocks {list(entry.shape)} must be"
                f" [n, rows, columns / {MX_SIZE}, {bytes_of_block}], with a scale for each"
            )
        elif entry.shape[-1] != bytes_of_block or {entry.dtype, scales.dtype} != {"U8"}:
            violations.append(
                f"{quoted(stored)}: {MXFP4} is U8 [n, rows, columns / {MX_SIZE}, {bytes_of_block}]"
            )
        elif name in entries:
            violations.append(f"{quoted(name)} is there, and in {MXFP4} beside it")
        else:
            count, rows, blocks_of_row, _ = entry.shape
            stacks[name] = entry._replace(dtype=MXFP4, shape=(count, blocks_of_row * MX_SIZE, rows))
    return stacks, violations


def _beside(entry: Entry | None) -> tuple[str, ...]:
    """The suffixes of what a tensor has beside it."""
    return (MX_BLOCKS, MX_SCALES) if entry is not None and entry.dtype == MXFP4 else ()


def adapter_of_recipe(recipe: Recipe) -> Pretrained | None:
    """The matrices in model.lora.path; None: new ones. Raises UsageError with every reason against them."""
    asked = recipe.model.lora
    if asked is None or asked.path is None:
        return None
    directory = Path(hub.local_path(asked.path))
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
    table = Tensors(recipe.architecture)
    for tensor in table:
        for pair in filter(None, adapters.pairs(tensor, asked.targets, asked.rank)):
            matrices = [adapters.published(matrix.name, matrix.shape, table.names) for matrix in pair]
            of_pair = {matrix.published[0]: matrix.shape for matrix in matrices}
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
