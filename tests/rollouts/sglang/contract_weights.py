"""The weights of the contract server: bytes by name, loaded from safetensors as SGLang loads a directory."""

import base64
import hashlib
import io
import json
import math
import pickle
import random
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SIZES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}
Kind = tuple[str, tuple[int, ...]]
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Broken(Exception):
    """The directory cannot be loaded."""


def read_directory(directory: Path) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
    """name, dtype, shape, bytes of each tensor of the files that the index names."""
    index = directory / "model.safetensors.index.json"
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else []
    for path in [directory / name for name in names] or sorted(directory.glob("*.safetensors")):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            values = data[8 + length + start : 8 + length + stop]
            if len(values) != stop - start:
                raise Broken(f"{path.name} is truncated")
            yield name, entry["dtype"], tuple(entry["shape"]), values


class Unpickler(pickle.Unpickler):
    """SGLang loads what these modules hold, and nothing else (0.5.16, utils/common.py)."""

    def find_class(self, module: str, name: str) -> Any:
        prefixes = (
            "builtins.",
            "collections.",
            "copyreg.",
            "functools.",
            "types.",
            "torch.",
            "multiprocessing.",
        )
        if not (module + ".").startswith(prefixes) or (module, name) == ("types", "FunctionType"):
            raise Broken(f"Blocked unsafe class loading ({module}.{name})")
        return super().find_class(module, name)


def open_bucket(payload: str) -> tuple[Any, list[Any]]:
    """The flat tensor of a bucket, and where each tensor lies in it."""
    content = Unpickler(io.BytesIO(base64.b64decode(payload, validate=True))).load()
    return content["flattened_tensor"], content["metadata"]


def read_bucket(payload: str) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    """name, dtype, shape, bytes of each tensor of a bucket."""
    import torch

    names = {torch.bfloat16: "BF16", torch.float32: "F32"}
    flat, places = open_bucket(payload)
    entries = []
    for place in places:
        part = flat[place.start_idx : place.end_idx].view(place.dtype).reshape(place.shape)
        values = part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert place.numel == len(values)
        entries.append((place.name, names[place.dtype], tuple(place.shape), values))
    return entries


class Weights:
    """`kinds` are dtype and shape by published name; `draft` names are loaded by the draft alone.

    `derived` tensors are the server's: no checkpoint has them, and no update replaces them.
    """

    def __init__(
        self, kinds: Mapping[str, Kind], draft: frozenset[str], derived: tuple[str, ...] = ()
    ) -> None:
        self.kinds, self.draft, self.derived = dict(kinds), draft, derived
        self.values: dict[str, bytes] = {}
        self.warnings: list[str] = []
        self._random = random.Random(7)
        for name in (*kinds, *derived):
            self.values[name] = b"\xee" * self._size(name)  # dummy weights

    def copy(self) -> "Weights":
        """The weights of this moment."""
        weights = Weights({}, self.draft, self.derived)
        weights.kinds, weights.values = self.kinds, dict(self.values)
        return weights

    def _size(self, name: str) -> int:
        if name in self.derived:
            return 8
        dtype, shape = self.kinds[name]
        return math.prod(shape) * SIZES[dtype]

    def load(self, directory: Path, change: str | None = None, most: int | None = None) -> None:
        """Raise Broken in the middle: what came before stays. Unknown names are warned of, and that is all.

        `change` is a fault of the way: a tensor is lost, doubled, or swapped with another of its shape.
        """
        self.load_entries(list(read_directory(directory)), change, most)

    def load_entries(self, entries: list, change: str | None = None, most: int | None = None) -> None:
        """As `load`, of the tensors in a list."""
        if change == "lost":
            del entries[len(entries) // 2]
        if change == "doubled":
            entries.append(entries[0])
        if change == "swapped":
            first, second = self._find_pair(entries)
            a, b = entries[first], entries[second]
            entries[first], entries[second] = (*a[:3], b[3]), (*b[:3], a[3])
        for name, dtype, shape, values in entries[:most]:
            if name not in self.kinds:
                self.warnings.append(name)
                continue
            if shape != self.kinds[name][1]:
                raise Broken(f"shape of {name}")
            if dtype != self.kinds[name][0]:
                values = b"\xdd" * self._size(name)  # converted in silence
            self.values[name] = values

    def _find_pair(self, entries: list) -> tuple[int, int]:
        for first, a in enumerate(entries):
            for second in range(first):
                if a[1:3] == entries[second][1:3] and a[3] != entries[second][3]:
                    return second, first
        raise AssertionError("no two tensors of one shape")

    def reset(self) -> None:
        for name in self.values:
            self.values[name] = self._random.randbytes(self._size(name))

    def compute_checksums(self) -> dict[str, str]:
        """By the server's names: q, k and v are one, gate and up are one, a draft's begin with draft."""
        fused: dict[str, list[bytes]] = {}
        for name, values in self.values.items():
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):  # rows of zeros up to 64
                rows = self.kinds[name][1][0]
                values = values + bytes(-rows % 64 * (len(values) // rows))
            server_name = name
            for joined, parts in FUSED.items():
                for part in parts:
                    server_name = server_name.replace(f".{part}.", f".{joined}.")
            fused.setdefault("draft." * (name in self.draft) + server_name, []).append(values)
        return {name: hashlib.sha256(b"".join(parts)).digest()[:8].hex() for name, parts in fused.items()}


KINDS: dict[str, Kind] = {
    "model.layers.0.self_attn.q_proj.weight": ("BF16", (4, 2)),
    "model.layers.0.self_attn.k_proj.weight": ("BF16", (2, 2)),
    "model.layers.0.self_attn.v_proj.weight": ("BF16", (2, 2)),
    "model.layers.0.mlp.gate_proj.weight": ("BF16", (3, 2)),
    "model.layers.0.mlp.up_proj.weight": ("BF16", (3, 2)),
    "model.embed_tokens.weight": ("BF16", (4, 2)),
    "model.mtp.0.weight": ("F32", (4,)),
}
DRAFT = frozenset({"model.mtp.0.weight"})
BAD = 99  # the token of weights that are not those of one version


def find_version(weights: Weights) -> int:
    """The version of which all tensors are, else BAD."""
    versions = set()
    for number, (name, (dtype, _)) in enumerate(weights.kinds.items()):
        values, size = weights.values[name], SIZES[dtype]
        for start in range(0, len(values), size):
            piece = values[start : start + size]
            value = struct.unpack("<f", piece if size == 4 else b"\0\0" + piece)[0]
            is_whole = math.isfinite(value) and value == int(value) and int(value) % 8 == number
            versions.add(int(value) // 8 if is_whole else BAD)
    return versions.pop() if len(versions) == 1 else BAD


def name_version(weights: Weights, ids: list[int], params: dict[str, Any], rid: str) -> tuple[int, float]:
    return find_version(weights), -0.5
