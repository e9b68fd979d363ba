"""The comparison of a directory's tensors with a recipe's model or adapters: names, shapes, types."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bundle import files, hub
from bundle.architectures import Architecture, adapters, from_config, read_config
from bundle.architectures.contents import has_weights
from bundle.architectures.identity import dump_architecture, list_changes
from bundle.architectures.published_names import PUBLISHED_NAMES
from bundle.architectures.tensors import Tensors
from bundle.errors import UsageError, format_value
from bundle.pretrained.directory import (
    FP8,
    MX_BLOCKS_SUFFIX,
    MX_SCALES_SUFFIX,
    MX_SIZE,
    MXFP4,
    SCALE_SUFFIX,
    PretrainedWeights,
    StoredTensor,
    count_blocks,
    find_weights,
    limit_violations,
    read_tensor_headers,
    to_printable,
)
from bundle.recipe import Recipe

FLOATS = ("F32", "BF16", "F16")
# Classes whose head gives labels or a reward, as transformers and reward models call them.
_OTHER_HEAD_CLASS_PATTERN = re.compile(r"For(?!CausalLM|ConditionalGeneration)[A-Z]\w*$|RewardModel")
_COMPARISON_CHUNK_BYTES = 2**24  # bytes at once
# Constants in old files that follow from the config.
_IGNORED_BUFFER_PATTERN = re.compile(r"\.rotary_emb\.inv_freq$")


def find_recipe_weights(recipe: Recipe) -> PretrainedWeights | None:
    """Return the weights that the recipe's model begins with; None: random ones.

    Raise UsageError with every reason why they cannot be loaded.
    """
    model = recipe.model
    if model.path is None or model.weights == "random":
        return None
    directory = Path(hub.build_cache_path_if_pinned(model.path))
    _refuse_non_lm_head(directory, model.config, PUBLISHED_NAMES[recipe.architecture.model_type].architecture)
    weights = find_weights(directory)
    if weights is None:
        if model.weights == "load":
            raise UsageError(
                f"{model.path}: no weights, but model.weights is 'load'. Set model.weights: random to start"
                " without them."
            )
        return None
    return _check_weights_match(
        weights,
        model.config,
        build_published_table(recipe),
        recipe.architecture.mtp_layers,
        "the weights do not fit this model (to start without them, set model.weights: random)",
    )


def find_model_weights(
    directory: Path, config: Mapping[str, Any], architecture: Architecture
) -> PretrainedWeights:
    """Return the weights of a directory, which must be those of a model with all of its published tensors.

    `config` is the directory's own; `architecture` says how many of its MTP layers there must be. Raise
    UsageError with every reason why they are not.
    """
    _refuse_non_lm_head(directory, config, PUBLISHED_NAMES[architecture.model_type].architecture)
    weights = find_weights(directory)
    if weights is None:
        raise UsageError(f"{directory}: no weights in safetensors")
    table = Tensors(from_config(config, f"{directory / 'config.json'}"))
    failure = f"the weights do not fit this {architecture.model_type} model"
    mtp_remedy = "Use --mtp-layers 0 to leave them out"
    return _check_weights_match(weights, config, table, architecture.mtp_layers, failure, mtp_remedy)


def find_compatible_weights(recipe: Recipe, directory: Path) -> PretrainedWeights:
    """Return the weights of a directory, which must be weights that the recipe's model could begin with.

    Raise UsageError with every reason why they cannot be loaded, and with every difference of its config from
    the recipe's. The number of its MTP layers may differ.
    """
    config = read_config(directory)
    architecture = from_config(config, str(directory / "config.json"))
    _refuse_non_lm_head(directory, config, PUBLISHED_NAMES[architecture.model_type].architecture)
    weights = find_weights(directory)
    if weights is None:
        raise UsageError(f"{directory}: no weights in safetensors")
    expected = replace(from_config(recipe.model.config, "model.config"), mtp_layers=architecture.mtp_layers)
    return _check_weights_match(
        weights,
        config,
        build_published_table(recipe),
        recipe.architecture.mtp_layers,
        "the weights do not fit the recipe's model",
        config_changes=list_changes(dump_architecture(architecture), expected, "its config.json"),
    )


def _refuse_non_lm_head(directory: Path, config: Mapping[str, Any], expected_class: str) -> None:
    """Raise UsageError where a config names a class without the head of a language model.

    `expected_class` is a class with such a head, for the message.
    """
    named = config.get("architectures")
    for name in named if isinstance(named, list) else ():
        if isinstance(name, str) and _OTHER_HEAD_CLASS_PATTERN.search(name):
            raise UsageError(
                f"{directory}: architectures: {to_printable(name)} does not have the head of a language"
                f" model. Name a checkpoint of {expected_class}, or start without its weights"
                " (model.weights: random)."
            )


def find_weights_ignoring_architecture(directory: Path) -> PretrainedWeights | None:
    """Return the weights of a directory, of any model; None where it is not a Hugging Face directory.

    Raise UsageError with everything that cannot be read.
    """
    if not has_weights(directory):
        return None
    weights = find_weights(directory)
    assert weights is not None
    config = read_config(directory) if files.is_file(directory / "config.json") else {}
    weights, violations = _with_quantization(weights, config)
    weights = _mark_transposed_stacks_by_config(weights, config)
    entries = weights.entries
    companions = {
        f"{name}{suffix}"
        for name in entries
        for suffix in (SCALE_SUFFIX, *_list_companion_suffixes(entries[name]))
    }
    for name, entry in entries.items():
        if name not in companions:
            violations += _find_misfit(
                name, entry, entry.shape, entries.get(f"{name}{SCALE_SUFFIX}"), weights.scale_block
            )
    if violations:
        raise UsageError(f"{directory}: the weights cannot be compared", limit_violations(violations))
    return weights


def _mark_transposed_stacks_by_config(
    weights: PretrainedWeights, config: Mapping[str, Any]
) -> PretrainedWeights:
    """Return the weights with all stacks in the published order, where the config's family is known."""
    family = config.get("model_type")
    if (
        not isinstance(family, str)
        or family not in PUBLISHED_NAMES
        or not PUBLISHED_NAMES[family].has_both_stack_orders
    ):
        return weights
    with suppress(UsageError):  # of whatever else it asks for there is no need here
        return _mark_transposed_stacks(weights, Tensors(from_config(config)))
    return weights


def _check_weights_match(
    weights: PretrainedWeights,
    config: Mapping[str, Any],
    table: Tensors,
    mtp_depths: int,
    failure: str,
    mtp_remedy: str = "Set model.mtp.layers: 0 to train without them",
    config_changes: Iterable[str] = (),
) -> PretrainedWeights:
    weights, violations = _with_quantization(weights, config)
    if table.names.has_both_stack_orders:
        weights = _mark_transposed_stacks(weights, table)
    violations = [*config_changes, *(violations or _find_mismatches(weights, table, mtp_depths, mtp_remedy))]
    if violations:
        raise UsageError(f"{weights.directory}: {failure}", limit_violations(violations))
    return weights


def list_weight_names_without_scales(directory: Path) -> Iterator[str]:
    """Yield the names of a directory's weights; a quantised one is named once, without its scales.

    Nothing is yielded where the directory holds no weights that can be read.
    """
    with suppress(UsageError):
        weights = find_weights(directory)
        for name in weights.entries if weights else ():
            if not name.endswith((SCALE_SUFFIX, MX_SCALES_SUFFIX)) and not _IGNORED_BUFFER_PATTERN.search(
                name
            ):
                yield name.removesuffix(MX_BLOCKS_SUFFIX)


def refuse_unequal_copies(weights: PretrainedWeights, copies: Mapping[str, str]) -> None:
    """Raise UsageError for copies that differ from their original.

    `copies`: the name of each copy -> the name of its original.
    """
    tensors = weights.entries
    unequal = [
        f"{copy} must be a copy of {original}, but differs from it"
        for copy, original in copies.items()
        if copy in tensors and not _are_equal(tensors[copy], tensors[original])
    ]
    if unequal:
        raise UsageError(
            f"{weights.directory}: tensors that share one megatron-core parameter differ in this checkpoint."
            " Leave out MTP layers (model.mtp.layers: 0, --mtp-layers 0). For lm_head, set"
            " tie_word_embeddings: false.",
            unequal,
        )


def _are_equal(a: StoredTensor, b: StoredTensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    with a.file.open("rb") as first, b.file.open("rb") as second:
        first.seek(a.start)
        second.seek(b.start)
        remaining = a.stop - a.start
        while remaining:
            size = min(remaining, _COMPARISON_CHUNK_BYTES)
            if first.read(size) != second.read(size):
                return False
            remaining -= size
    return True


def describe_weights(recipe: Recipe, pretrained: PretrainedWeights | None) -> str:
    """Return a description of the first weights; `pretrained` is the result of `find_recipe_weights`."""
    if pretrained is not None:
        return str(pretrained)
    path, weights = recipe.model.path, recipe.model.weights
    reason = f"{path} holds no weights" if path else "the recipe names no model.path"
    return f"random weights, because {'model.weights is random' if weights == 'random' else reason}"


def build_published_table(recipe: Recipe) -> Tensors:
    """Return the table of the published tensors by the config: with its own MTP layers.

    The number of MTP layers that are trained does not matter.
    """
    return Tensors(from_config(recipe.model.config, "model.config"), recipe.parallel.tp)


def _find_mismatches(
    weights: PretrainedWeights, table: Tensors, mtp_depths: int, mtp_remedy: str
) -> Iterator[str]:
    """Yield every mismatch; `mtp_depths` MTP layers are trained, and more of them may be in the files."""
    entries, copies = weights.entries, table.map_copies()
    expected: dict[str, tuple[int, ...]] = {}
    optional: set[str] = set(copies)
    for tensor in table:
        expected |= tensor.list_published_shapes()
        mtp_match = re.match(r"mtp\.layers\.(\d+)\.", tensor.name)
        if mtp_match and int(mtp_match[1]) >= mtp_depths:
            optional.update(tensor.published_names)
    expected |= {copy: expected[original] for copy, original in copies.items()}
    missing = [name for name in expected if name not in entries and name not in optional]
    yield from (f"{name} is missing{more}" for name, more in _list_first_names_with_counts(missing))
    mtp_names = {
        name for tensor in table if tensor.name.startswith("mtp.") for name in tensor.published_names
    }
    if missing and mtp_names.issuperset(missing):
        yield f"only the multi-token prediction (MTP) layers are missing. {mtp_remedy}"
    known = set(expected)
    for name in expected:
        known |= {f"{name}{SCALE_SUFFIX}"} if weights.scale_block else set()
        known |= {f"{name}{suffix}" for suffix in _list_companion_suffixes(entries.get(name))}
    extra = [name for name in entries if name not in known and not _IGNORED_BUFFER_PATTERN.search(name)]
    if ignored_prefix := table.names.ignored_prefix:
        extra = [name for name in extra if not name.startswith(ignored_prefix)]
    yield from (
        f"{name} is not a tensor of this model{more}" for name, more in _list_first_names_with_counts(extra)
    )
    for name, shape in expected.items():
        if name in entries:
            yield from _find_misfit(
                name, entries[name], shape, entries.get(f"{name}{SCALE_SUFFIX}"), weights.scale_block
            )


def _find_misfit(
    name: str,
    entry: StoredTensor,
    shape: tuple[int, ...],
    scale: StoredTensor | None,
    block: tuple[int, int] | None,
) -> Iterator[str]:
    if entry.shape != shape:
        yield f"{name} has shape {list(entry.shape)}, but the model's is {list(shape)}"
    elif entry.dtype == FP8:
        if block is None or scale is None or len(shape) != 2:
            yield (
                f"{name} is {FP8}, which needs two dimensions, a {SCALE_SUFFIX} tensor and"
                " quantization_config.weight_block_size in config.json"
            )
            return
        expected_shape = count_blocks(shape, block)
        if scale.shape != expected_shape or scale.dtype not in FLOATS:
            actual = f"{scale.dtype} {list(scale.shape)}"
            yield (
                f"{name}{SCALE_SUFFIX} is {actual}, but must be {list(expected_shape)} floating-point"
                f" numbers, one per block of {list(block)}"
            )
    elif entry.dtype not in (*FLOATS, MXFP4):
        yield f"{name} is {entry.dtype}: only {', '.join(FLOATS)}, {FP8} and {MXFP4} are read"
    elif scale is not None:
        yield f"{name} is {entry.dtype} and has a {SCALE_SUFFIX}, which only {FP8} needs"


def _mark_transposed_stacks(weights: PretrainedWeights, table: Tensors) -> PretrainedWeights:
    """Return the weights with all stacks in the published order, if they are transposed in these files.

    A square matrix does not tell the order; at most one of a layer's two is square.
    """
    shapes = {
        name: shape
        for tensor in table
        if tensor.stack
        for name, shape in tensor.list_published_shapes()
        if name in weights.entries
    }
    stacks = {
        name: weights.entries[name]._replace(shape=shape, is_transposed=True)
        for name, shape in shapes.items()
    }
    fitting = [name for name, entry in stacks.items() if entry.untransposed_entry == weights.entries[name]]
    if not any(shapes[name] != weights.entries[name].shape for name in fitting):
        return weights
    return weights._replace(entries={**weights.entries, **{name: stacks[name] for name in fitting}})


def format_similar_name_examples(names: Iterable[str]) -> Iterator[str]:
    """Yield one of the names that differ in numbers alone, and how many more there are."""
    yield from (f"{name}{more}" for name, more in _list_first_names_with_counts(names))


def _list_first_names_with_counts(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the first of the names that differ only in numbers (layers, experts), and a count of the rest."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    for pattern, members in groups.items():
        more = f" (and {len(members) - 1} more like {to_printable(pattern)})" if len(members) > 1 else ""
        yield to_printable(members[0]), more


def _with_quantization(
    weights: PretrainedWeights, config: Mapping[str, Any]
) -> tuple[PretrainedWeights, list[str]]:
    """Return the weights with the facts about their quantisation, and the violations of these."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return weights, []
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method == "mxfp4":
        stacks, violations = _join_mxfp4_stacks(weights.entries)
        return weights._replace(entries={**weights.entries, **stacks}), violations
    if not isinstance(quantization, dict) or method != "fp8":
        value = "missing" if method is None else f"{format_value(method)}, which is not supported"
        return weights, [
            f"quantization_config.quant_method in config.json is {value}. Use a checkpoint with 'mxfp4',"
            " with 'fp8' (block-wise), or without quantization_config"
        ]
    block = quantization.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
        return weights._replace(scale_block=(block[0], block[1])), []
    value = "missing" if block is None else format_value(block)
    return weights, [
        f"quantization_config.weight_block_size in config.json is {value}, but must be two block sizes above"
        " 0, such as [128, 128]. Use a checkpoint with block-wise fp8"
    ]


def _join_mxfp4_stacks(entries: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the stacks that pairs of blocks and scales form, by name, and the pairs that do not fit."""
    stacks, violations = {}, []
    for stored, entry in entries.items():
        if not stored.endswith(MX_BLOCKS_SUFFIX):
            continue
        name, bytes_of_block = stored.removesuffix(MX_BLOCKS_SUFFIX), MX_SIZE // 2
        scales = entries.get(f"{name}{MX_SCALES_SUFFIX}")
        if scales is None or scales.shape != entry.shape[:-1] or len(entry.shape) != 4:
            actual = "missing" if scales is None else f"{list(scales.shape)}"
            violations.append(
                f"{to_printable(name)}{MX_SCALES_SUFFIX} is {actual}: {MXFP4} blocks {list(entry.shape)}"
                " must be"
                f" [n, rows, columns / {MX_SIZE}, {bytes_of_block}], with a scale for each"
            )
        elif entry.shape[-1] != bytes_of_block or {entry.dtype, scales.dtype} != {"U8"}:
            violations.append(
                f"{to_printable(stored)}: {MXFP4} must be U8 [n, rows, columns / {MX_SIZE}, {bytes_of_block}]"
            )
        elif name in entries:
            violations.append(f"{to_printable(name)} is stored twice, once plain and once in {MXFP4}")
        else:
            count, rows, blocks_of_row, _ = entry.shape
            stacks[name] = entry._replace(dtype=MXFP4, shape=(count, blocks_of_row * MX_SIZE, rows))
    return stacks, violations


def _list_companion_suffixes(entry: StoredTensor | None) -> tuple[str, ...]:
    """Return the suffixes of the tensors that belong to a tensor."""
    return (MX_BLOCKS_SUFFIX, MX_SCALES_SUFFIX) if entry is not None and entry.dtype == MXFP4 else ()


def find_recipe_adapter(recipe: Recipe) -> PretrainedWeights | None:
    """Return the matrices in model.lora.path; None: new ones. Raise UsageError with all mismatches."""
    lora = recipe.model.lora
    if lora is None or lora.path is None:
        return None
    directory = Path(hub.build_cache_path_if_pinned(lora.path))
    path = directory / adapters.WEIGHTS_FILE
    try:
        tensors = read_tensor_headers(path)
    except UsageError as error:
        reasons = "; ".join(limit_violations([*error.violations], 3))
        raise UsageError(f"{path}: cannot be read ({reasons}). Copy or export the adapter again") from error
    if violations := list(_find_adapter_mismatches(tensors, recipe)):
        raise UsageError(f"{directory}: the adapter does not fit this model", limit_violations(violations))
    return PretrainedWeights(directory, tensors)


def _find_adapter_mismatches(tensors: dict[str, StoredTensor], recipe: Recipe) -> Iterator[str]:
    """Yield every mismatch; PEFT knows no MTP layers, and an adapter may lack theirs."""
    lora = recipe.model.lora
    assert lora is not None
    expected: dict[str, tuple[int, ...]] = {}
    optional: set[str] = set()
    table = Tensors(recipe.architecture)
    for tensor in table:
        pairs = adapters.build_adapter_pairs(tensor, lora.targets, lora.rank, use_dora=lora.use_dora)
        for pair in filter(None, pairs):
            matrices = [
                adapters.build_adapter_tensor(matrix.name, matrix.shape, table.names)
                for matrix in pair.list_trained_matrices()
            ]
            pair_shapes = {matrix.published_names[0]: matrix.shape for matrix in matrices}
            expected |= pair_shapes
            if tensor.name.startswith("mtp."):
                optional.update(pair_shapes)
    for name, shape in expected.items():
        if name not in tensors:
            if name not in optional:
                yield f"{name} is missing"
        elif tensors[name].shape != shape:
            yield f"{name} has shape {list(tensors[name].shape)}, but the model's is {list(shape)}"
        elif tensors[name].dtype not in FLOATS:
            yield f"{name} holds {tensors[name].dtype}: only {', '.join(FLOATS)} are read"
    yield from (
        f"{to_printable(name)} belongs to none of the targets" for name in tensors if name not in expected
    )
