"""Whether the tensors of a directory are those of a recipe's model: names, shapes, kinds of numbers."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bundle.architectures import from_config
from bundle.architectures.tensors import Tensors
from bundle.errors import UsageError, shown
from bundle.pretrained.directory import Pretrained, summarized, weights_in
from bundle.pretrained.header import Entry, quoted
from bundle.recipe import Recipe

FLOATS = ("F32", "BF16", "F16")
FP8 = "F8_E4M3"
SCALE = "_scale_inv"  # behind the name of a tensor in FP8: the numbers to multiply its blocks by
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
    block, violations = _block(model.config)
    found = replace(found, block=block)
    table = published(recipe)
    violations = violations or list(_against(found, table, recipe.architecture.mtp_layers))
    if violations:
        raise UsageError(
            f"{model.path}: not the weights of this model (model.weights: random begins without them)",
            summarized(violations),
        )
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


def _block(config: Mapping[str, Any]) -> tuple[tuple[int, int] | None, list[str]]:
    """The block of an FP8 scale, and what is against how the weights are quantised."""
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
        blocks = tuple(-(-size // of) for size, of in zip(shape, block, strict=True))
        if scale.shape != blocks or scale.dtype not in FLOATS:
            held = f"{scale.dtype} {list(scale.shape)}"
            yield f"{name}{SCALE} is {held}, must be {list(blocks)} numbers, one per block of {list(block)}"
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
