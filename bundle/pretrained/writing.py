"""Writes a directory in the form of the Hub: safetensors of bounded size, their index, config and tokenizer.

Other files of a model, such as processors and code, are copied too.
"""

import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from bundle import files, hub
from bundle.architectures import Architecture
from bundle.architectures.contents import (
    CHAT_TEMPLATE_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    TOKENIZER_CONFIG,
    TOKENIZER_PATTERNS,
    has_tokenizer,
)
from bundle.architectures.published_names import PUBLISHED_NAMES
from bundle.architectures.tensors import TOWER_PREFIX, Tensor, Tensors
from bundle.pretrained.directory import DTYPE_BYTES
from bundle.pretrained.matching import list_weight_names_without_scales
from bundle.recipe import Recipe

_log = logging.getLogger(__name__)

MAX_FILE_BYTES = 5 * 10**9  # bytes of tensors, as transformers divides them
# Files that are copied from a model's source besides its tokenizer: no weights, nothing that names them.
_GENERATION_CONFIG_FILE = "generation_config.json"
_EXTRA_PATTERNS = (_GENERATION_CONFIG_FILE, "*processor_config.json", "*.py")
# A tokenizer's files, all from one directory: parts of two tokenizers would make a third one.
_TOKENIZER_FILES = (
    *TOKENIZER_PATTERNS, "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "tokenization*.py",
)  # fmt: skip
# The formats of the linear layers; with fp8 all other layers are bf16.
WeightFormat = Literal["bf16", "fp32", "fp8"]
WEIGHT_NUMBER_FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)
FP8_BLOCK_SHAPE = (128, 128)  # rows and columns of one FP8 scale
_CONFIG_DTYPES: dict[WeightFormat, str] = {"bf16": "bfloat16", "fp32": "float32", "fp8": "bfloat16"}


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """The description of a model in a directory, besides its weights.

    `config` is the published one with the changes. The tokenizer and the chat template are those of the
    directory `tokenizer`. Other files, such as processors and code, are in `extra_directories`. Training
    began with the weights in `source`; None: with random ones.
    """

    config: Mapping[str, Any]
    architecture: Architecture
    tokenizer: Path | None = None
    extra_directories: tuple[Path, ...] = ()
    source: Path | None = None
    chat_template: str | None = None  # that takes the place of the tokenizer's chat template

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> "PublishedModel":
        """Return the published form of the recipe's model, with the tokenizer that it is trained with.

        A model that is trained on bytes keeps the tokenizer that it was published with.
        """
        kind, _, tokenizer_path = recipe.data.tokenizer.partition(":")
        model = Path(hub.build_cache_path_if_pinned(recipe.model.path)) if recipe.model.path else None
        tokenizer = Path(hub.build_cache_path_if_pinned(tokenizer_path)) if kind == "hf" else model
        extra_directories = tuple(source for source in (model, tokenizer) if source)
        source = None if recipe.model.weights == "random" else model
        return cls(
            recipe.model.config,
            recipe.architecture,
            tokenizer,
            extra_directories,
            source,
            recipe.data.custom_template_text,
        )

    def read_source_tensor_names(self) -> list[str]:
        """Return the names of the tensors in `source`; none where it holds none that can be read."""
        return list(list_weight_names_without_scales(self.source)) if self.source else []

    @property
    def source_directories(self) -> list[Path]:
        """Every directory that something is copied from."""
        return [*self.extra_directories, *([self.tokenizer] if self.tokenizer else [])]

    @property
    def missing_tokenizer_reason(self) -> str | None:
        """The reason why the directory would lack a tokenizer; None where there is one or none was named."""
        if self.tokenizer is None or has_tokenizer(self.tokenizer):
            return None
        return (
            f"'{self.tokenizer}' {'holds no tokenizer' if self.tokenizer.is_dir() else 'is not a directory'}"
        )


@dataclass(frozen=True, slots=True)
class OutputTensorHeader:
    """A tensor as it is to be stored; `dtype` as safetensors spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The size of its values."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def split_into_files(
    tensors: Iterable[OutputTensorHeader], max_bytes: int = MAX_FILE_BYTES
) -> Iterator[list[OutputTensorHeader]]:
    """Yield the tensors of one file after the other, in their order; a larger tensor has its own file."""
    file_tensors: list[OutputTensorHeader] = []
    size = 0
    for tensor in tensors:
        if file_tensors and size + tensor.bytes > max_bytes:
            yield file_tensors
            file_tensors, size = [], 0
        file_tensors.append(tensor)
        size += tensor.bytes
    if file_tensors:
        yield file_tensors


class SafetensorsFileWriter:
    """A safetensors file that is written tensor by tensor, in the given order.

    All methods raise JobFailed where it cannot be written.
    """

    def __init__(self, path: Path, tensors: Sequence[OutputTensorHeader]) -> None:
        """Write the header."""
        header_fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in tensors:
            offsets = [offset, offset + tensor.bytes]
            header_fields[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": offsets,
            }
            offset = offsets[1]
        header = json.dumps(header_fields, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        self._remaining, self._path = offset, path
        with files.convert_write_errors(path):
            self._file = files.open_large_file_writer(path)
            self._file.write(len(header).to_bytes(8, "little") + header)

    def append(self, values: bytes | memoryview) -> None:
        """Write the values of the next tensor."""
        self._remaining -= len(values)
        with files.convert_write_errors(self._path):
            self._file.write(values)

    def close(self) -> None:
        """Flush the file to the disk; all tensors must be in it."""
        assert self._remaining == 0, f"{self._remaining} bytes of the announced tensors were not written"
        with files.convert_write_errors(self._path), self._file as file:
            file.flush()
            os.fsync(file.fileno())

    def close_ignoring_errors(self) -> None:
        """Close a file that could not be written."""
        with suppress(OSError):
            self._file.close()


def build_file_names(count: int) -> list[str]:
    """Return the names that transformers gives to the files of a model with `count` files."""
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def write_index_if_sharded(
    directory: Path, tensors_by_file: Mapping[str, Sequence[OutputTensorHeader]]
) -> None:
    """Write the index of these files; a single file has none."""
    if len(tensors_by_file) > 1:
        weight_map = {tensor.name: file for file, tensors in tensors_by_file.items() for tensor in tensors}
        total = sum(tensor.bytes for tensors in tensors_by_file.values() for tensor in tensors)
        files.write_json(
            directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map}
        )


def write_config(directory: Path, model: PublishedModel, weight_format: WeightFormat) -> None:
    """Write the published config in its own words, changed for the model as it was trained."""
    architecture = model.architecture
    names = PUBLISHED_NAMES[architecture.model_type]
    config = {**names.config_defaults, **model.config}
    config.pop("quantization_config", None)  # loaders would look for scales
    if weight_format == "fp8":
        config["quantization_config"] = _build_quantization_config(Tensors(architecture))
    key = "dtype" if "dtype" in config else "torch_dtype"  # transformers 5 and 4
    config[key] = _CONFIG_DTYPES[weight_format]
    config.setdefault("architectures", [names.architecture])
    if names.mtp is not None:
        config["num_nextn_predict_layers"] = architecture.mtp_layers
    files.write_json(directory / "config.json", config)


def is_exported_in_fp8(name: str) -> bool:
    """Return whether an FP8 export has this tensor of the table in FP8.

    These are the weights of the linear layers, without those of routers and of a tower.
    """
    path, _, kind = name.rpartition(".")
    linear = path.rpartition(".")[2].startswith("linear_") and kind == "weight"
    return linear and not name.startswith(TOWER_PREFIX)


def _build_quantization_config(tensors: Iterable[Tensor]) -> dict[str, Any]:
    """Return the `quantization_config` of a model with these tensors, as loaders read it."""
    unquantized = [
        name.removesuffix(".weight")
        for tensor in tensors
        if len(tensor.shape) == 2
        and not is_exported_in_fp8(tensor.name)
        and not tensor.name.startswith("embedding.")
        for name in tensor.published_names
    ]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(FP8_BLOCK_SHAPE),
        "modules_to_not_convert": unquantized,
    }


def write_remaining_files(
    directory: Path,
    model: PublishedModel,
    weight_format: WeightFormat,
    tensors_by_file: Mapping[str, Sequence[OutputTensorHeader]],
    end_tokens: Iterable[int] = (),
) -> None:
    """Write the files that belong to these files of tensors: their index, the config, the tokenizer.

    Where the tokenizer is missing it logs a warning, because the weights alone are useful. Generation also
    ends at `end_tokens`.
    """
    write_index_if_sharded(directory, tensors_by_file)
    write_config(directory, model, weight_format)
    if model.missing_tokenizer_reason:
        _log.warning(
            "the model is written without a tokenizer and a chat template: %s", model.missing_tokenizer_reason
        )
    copy_extra_files(model, directory)
    _add_end_tokens(directory, end_tokens)


def _add_end_tokens(directory: Path, end_tokens: Iterable[int]) -> None:
    """Add the tokens that end trained turns to the config of generation.

    A base model's config has only the token that ends a document.
    """
    path, key = directory / _GENERATION_CONFIG_FILE, "eos_token_id"
    generation_config = files.read_json_object(path) if path.exists() else {}
    previous = generation_config.get(key, files.read_json_object(directory / "config.json").get(key))
    known_tokens = previous if isinstance(previous, list) else [] if previous is None else [previous]
    if new_tokens := [token for token in sorted(set(end_tokens)) if token not in known_tokens]:
        files.write_json(path, {**generation_config, key: [*known_tokens, *new_tokens]})
        _log.info(
            "%s: %s: added the tokens %s, which end the turns that were trained",
            directory,
            _GENERATION_CONFIG_FILE,
            new_tokens,
        )


def _write_chat_template(directory: Path, text: str) -> None:
    """Write this chat template into every file in which a release of transformers looks for it."""
    files.write_text(directory / CHAT_TEMPLATE_FILE, text)
    for name in (TOKENIZER_CONFIG, "chat_template.json"):  # the latter of a processor
        path = directory / name
        if path.exists():
            files.write_json(path, {**files.read_json_object(path), "chat_template": text})


def copy_extra_files(model: PublishedModel, directory: Path) -> None:
    """Copy the tokenizer with its chat template, then the other files of the model.

    If two directories have a file of one name, the first one's is copied. Files of a tokenizer are copied
    from the tokenizer's directory alone.
    """
    if model.tokenizer is not None:
        _copy_missing_files(model.tokenizer, _TOKENIZER_FILES, directory)
    for source in model.extra_directories:
        _copy_missing_files(source, _EXTRA_PATTERNS, directory)
    if model.chat_template is not None:
        _write_chat_template(directory, model.chat_template)


def _copy_missing_files(source: Path, patterns: Iterable[str], directory: Path) -> None:
    for path in sorted({path for pattern in patterns for path in source.glob(pattern)}):
        if path.is_file() and not (directory / path.name).exists():
            with files.convert_write_errors(directory / path.name):
                shutil.copyfile(path, directory / path.name)
