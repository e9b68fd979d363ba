"""The safetensors files of a directory, found as transformers finds them, and every tensor in them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundle import files
from bundle.errors import UsageError, shown
from bundle.pretrained.header import Damaged, Entry, entries, quoted

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST_INDEX = 2**28
_OTHERS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf")


@dataclass(frozen=True, slots=True)
class Pretrained:
    """The tensors of a directory by their published names. `block`: rows and columns of one FP8 scale."""

    directory: Path
    entries: Mapping[str, Entry]
    block: tuple[int, int] | None = None

    @property
    def bytes(self) -> int:
        """What all of them take in the files."""
        return sum(entry.stop - entry.start for entry in self.entries.values())

    def __str__(self) -> str:
        return f"{self.directory}: {len(self.entries)} tensors, {self.bytes / 2**30:.2f} GiB"


def weights_in(directory: Path) -> Pretrained | None:
    """The weights of a directory; None where it holds none in any form.

    Raises UsageError with everything that is wrong with the index and the files' headers, and for weights
    that are not safetensors.
    """
    if not files.is_directory(directory):
        raise UsageError(f"{directory} is no directory")
    if files.is_file(directory / SINGLE):
        indexed = {}
        paths = [directory / SINGLE]
    elif files.is_file(directory / INDEX):
        indexed = _indexed(directory / INDEX)
        paths = [directory / name for name in sorted(set(indexed.values()))]
    else:
        _refuse_others(directory)
        return None
    found: dict[str, Entry] = {}
    violations = []
    for path in paths:
        try:
            read = entries(path)
        except Damaged as damage:
            violations += [f"{quoted(path.name)}: {reason}" for reason in damage.reasons]
            indexed = {name: file for name, file in indexed.items() if file != path.name}  # said once
            continue
        violations += [
            f"{quoted(name)} is in {quoted(path.name)} and in {quoted(found[name].file.name)}"
            for name in read
            if name in found
        ]
        found |= read
    violations += _elsewhere(indexed, found)
    if violations:
        raise UsageError(f"{directory}: the weights cannot be read", summarized(violations))
    return Pretrained(directory, found)


def summarized(violations: list[str], most: int = 100) -> list[str]:
    """The violations, of which there may be one for each tensor of a large model: at most so many lines."""
    more = len(violations) - most
    return violations if more <= 0 else [*violations[:most], f"and {more} more"]


def _refuse_others(directory: Path) -> None:
    try:
        others = sorted({path.name for pattern in _OTHERS for path in directory.glob(pattern)})
    except OSError as error:
        raise UsageError(f"{directory}: {error.strerror}") from error
    if others:
        raise UsageError(
            f"{directory} holds {quoted(others[0])}, but neither {SINGLE} nor {INDEX}: only"
            " safetensors are read (a pickle could run code); transformers' save_pretrained writes them"
        )


def _indexed(path: Path) -> dict[str, str]:
    """The file of each tensor, by the index."""
    try:
        index: Any = json.loads(files.content(path, LARGEST_INDEX))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names:
        raise UsageError(f"{path}: has no weight_map that names files")
    violations = [
        f"{quoted(name)}: {shown(file)} is no name of a safetensors file in this directory"
        for name, file in names.items()
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors")
    ]
    if violations:
        raise UsageError(f"{path} cannot be used", summarized(violations))
    return names


def _elsewhere(indexed: Mapping[str, str], found: Mapping[str, Entry]) -> Iterator[str]:
    for name, file in indexed.items():
        if name not in found:
            yield f"{quoted(name)} is not in {quoted(file)}, where {INDEX} has it"
        elif found[name].file.name != file:
            place = quoted(found[name].file.name)
            yield f"{quoted(name)} is in {place}, {INDEX} has it in {quoted(file)}"
