"""Directories as the Hub has them, of a tiny model: written byte by byte, without safetensors or torch."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bundle.recipe import Recipe, from_mapping
from tests.reference import weights
from tests.reference.configs import CONFIGS

SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I8": 1, "F8_E4M3": 1}
Header = dict[str, Any]


def header(shapes: dict[str, tuple[int, ...]], dtype: str = "BF16") -> Header:
    """What a file that holds these tensors one behind the other says of them."""
    found, at = {}, 0
    for name, shape in shapes.items():
        end = at + math.prod(shape) * SIZES[dtype]
        found[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    return found


def write_file(path: Path, of: Header | bytes, data: int | None = None) -> None:
    """A file with this header and as many bytes of data, or as many as the header says."""
    text = of if isinstance(of, bytes) else json.dumps(of).encode()
    if data is None:
        assert not isinstance(of, bytes)
        data = max((value["data_offsets"][1] for value in of.values()), default=0)
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))


def write(
    directory: Path, name: str = "qwen2", shards: int = 1, more: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, Header]:
    """The directory of a model of `CONFIGS`; the header of each file. `more` are shapes to write besides."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIGS[name]))
    shapes = weights.shapes(CONFIGS[name]) | dict(more or {})
    if shards == 1:
        found = {"model.safetensors": header(shapes)}
    else:
        names = list(shapes)
        found = {
            f"model-{i + 1:05d}-of-{shards:05d}.safetensors": header(
                {key: shapes[key] for key in names[i::shards]}
            )
            for i in range(shards)
        }
        write_index(directory, found)
    for file, of in found.items():
        write_file(directory / file, of)
    return found


def write_index(directory: Path, of: dict[str, Header]) -> None:
    """The index of these files."""
    weight_map = {key: file for file, tensors in of.items() for key in tensors}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def recipe(directory: Path, **model: Any) -> Recipe:
    """A job that begins with what is in the directory."""
    read = json.loads((directory / "config.json").read_text())
    return from_mapping(
        {
            "name": "weights",
            "model": {"path": str(directory), "config": read} | model,
            "data": {"source": "text", "path": ["none"], "tokenizer": "hf:none", "sequence_length": 64},
            "train": {"steps": 1, "global_batch_size": 1},
        }
    )
