"""The manifest of one version of the weights: the tensors that are sent, and those that are left out."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bundle.architectures import Architecture
from bundle.architectures.tensors import Tensors
from bundle.errors import EnvironmentUnfit, JobFailed, format_count
from bundle.pretrained.directory import FP8, find_weights, limit_violations
from bundle.pretrained.writing import OutputTensorHeader

Role = Literal["target", "draft"]
# A server converts these into each other. A value of another kind loses its scale in silence.
_CONVERTIBLE_FLOAT_DTYPES = frozenset({"F32", "BF16", "F16"})
_DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float8_e4m3fn: FP8}


@dataclass(frozen=True, slots=True)
class SentTensor:
    """A tensor as it is sent; `digest` is the xxh3_128 of its bytes, `role` the model that loads it."""

    stored: OutputTensorHeader
    role: Role
    digest: str


class ExpectedTensors(NamedTuple):
    """What the names of an architecture mean: `expected` shapes, the names of drafts, copies of others.

    `copies` are by name the tensors that they repeat: a tied head, the embedding of a draft.
    """

    expected: Mapping[str, tuple[int, ...]]
    draft: frozenset[str]
    copies: Mapping[str, str]

    @classmethod
    def from_architecture(cls, architecture: Architecture) -> "ExpectedTensors":
        """Return the table of an architecture; the tensors of MTP layers are those of a draft."""
        trunk, full = Tensors(replace(architecture, mtp_layers=0)), Tensors(architecture)
        expected = {name: shape for tensor in full for name, shape in tensor.list_published_shapes()}
        in_trunk = {name for tensor in trunk for name in tensor.published_names} | trunk.map_copies().keys()
        return cls(expected, frozenset({*expected, *full.map_copies()} - in_trunk), full.map_copies())


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version of the weights. `left_out` are the names in the stream that the server has no use for."""

    version: int
    tensors: Mapping[str, SentTensor]
    left_out: tuple[str, ...]
    copies: Mapping[str, str]

    @property
    def bytes(self) -> int:
        """The size of all values."""
        return sum(tensor.stored.bytes for tensor in self.tensors.values())

    def check_server_tensors(self, declared: Mapping[str, OutputTensorHeader]) -> None:
        """Raise JobFailed where the tensors are not those that the server's checkpoint declares."""
        violations = list(self._find_differences(declared))
        if violations:
            raise JobFailed(
                f"rl.rollout.engine: the checkpoint of the server does not match version {self.version} of"
                f" the weights ({format_count(len(self.tensors), 'tensor')},"
                f" {format_count(len(violations), 'difference')}). Serve the model that is trained.",
                limit_violations(violations),
            )

    def check_and_filter_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of another version, without those that are left out.

        Raise JobFailed for one that is not in this manifest, that repeats, and at the end for missing ones.
        """
        missing = {name: tensor.stored for name, tensor in self.tensors.items()}
        for name, tensor in tensors:
            if name in self.left_out:
                continue
            stored, sent = missing.pop(name, None), describe_tensor(name, tensor)
            if stored != sent:
                raise JobFailed(f"rollout: {name} {self._explain_misfit(stored, sent)}")
            yield name, tensor
        if missing:
            raise JobFailed(
                f"rollout: the new weights lack {format_count(len(missing), 'tensor')} of version"
                f" {self.version}. Send the same tensors in every version.",
                limit_violations(list(missing)),
            )

    def _explain_misfit(self, stored: OutputTensorHeader | None, sent: OutputTensorHeader) -> str:
        weights = f"version {self.version} of the weights"
        if stored is None:
            if sent.name in self.tensors:
                return "was sent twice. Send each tensor once."
            return f"is not in {weights}. Send the same tensors in every version."
        was = f"{stored.dtype} {list(stored.shape)}"
        actual = f"{sent.dtype} {list(sent.shape)}"
        return f"is {actual}, but {was} in {weights}. Send the same tensors in every version."

    def _find_differences(self, declared: Mapping[str, OutputTensorHeader]) -> Iterator[str]:
        accounted = {*self.tensors, *self.left_out}
        for name in declared:
            if name not in accounted and self.copies.get(name) not in accounted:
                yield f"missing: {name} is only in the checkpoint of the server"
        for name, tensor in self.tensors.items():
            server = declared.get(name)
            if server is None:
                if name not in self.copies:
                    yield f"unknown: {name} is only in the trained weights"
                continue
            if server.shape != tensor.stored.shape:
                yield f"shape: {name} is {list(tensor.stored.shape)}, but the server has {list(server.shape)}"
            if (
                server.dtype != tensor.stored.dtype
                and not {server.dtype, tensor.stored.dtype} <= _CONVERTIBLE_FLOAT_DTYPES
            ):
                yield f"dtype: {name} is {tensor.stored.dtype}, but the server has {server.dtype}"


def describe_tensor(name: str, tensor: Tensor) -> OutputTensorHeader:
    """Return a tensor as files and servers name it."""
    return OutputTensorHeader(name, _DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))


def read_header_tensors(directory: Path) -> dict[str, OutputTensorHeader]:
    """Return the tensors that the files of a checkpoint declare, from their headers; {} without weights.

    Raise UsageError for files that cannot be read.
    """
    weights = find_weights(directory)
    return {
        name: OutputTensorHeader(name, entry.dtype, entry.untransposed_entry.shape)
        for name, entry in (weights.entries if weights else {}).items()
    }


def build_expected_tensors(table: ExpectedTensors, dtype: str) -> dict[str, OutputTensorHeader]:
    """Return the tensors of an architecture, for a checkpoint of which there is the config alone."""
    return {name: OutputTensorHeader(name, dtype, tuple(shape)) for name, shape in table.expected.items()}


def compute_digest(values: bytes | memoryview) -> str:
    """Return the xxh3_128 of these bytes, 32 hexadecimal digits. Raise EnvironmentUnfit without xxhash."""
    try:
        from xxhash import xxh3_128_hexdigest
    except ImportError as error:
        raise EnvironmentUnfit(
            "rl.rollout.engine: sglang needs xxhash. Install it: pip install 'mcore-bundle[rl]'."
        ) from error
    return xxh3_128_hexdigest(values)


def list_digest_differences(manifest: Manifest, digests: Iterable[tuple[str, str]]) -> list[str]:
    """Return what differs between the manifest and the digests of what lies somewhere, by name."""
    received = dict(digests)
    missing = [f"missing: {name}" for name in manifest.tensors if name not in received]
    unknown = [f"unknown: {name}" for name in received if name not in manifest.tensors]
    changed = [
        f"digest: {name}"
        for name, tensor in manifest.tensors.items()
        if received.get(name, tensor.digest) != tensor.digest
    ]
    return missing + unknown + changed
