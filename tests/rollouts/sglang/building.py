"""Rollouts over contract servers in this process, whose answers say of which weights they are."""

import math
import struct
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bundle.pretrained.writing import OutputTensor
from bundle.rollouts import Request, Sampling
from bundle.rollouts.sglang import ServedModel, SGLangRollout
from bundle.rollouts.sglang.client import Client, Keys
from bundle.rollouts.sglang.server import ServerReplica
from bundle.weight_sync.manifest import NameTable
from bundle.weight_sync.transports.files import FilesTransport
from tests.rollouts.sglang.contract_server import ContractLauncher, ContractServer, Fault
from tests.rollouts.sglang.contract_weights import SIZES, Kind, Weights

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
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
BAD = 99  # the token of weights that are not those of one version
SAMPLING = Sampling(temperature=1.0, max_completion_length=3, stop=(), seed=1, step=1)
REQUESTS = [Request((1, 2, question), question, answer) for question in range(4) for answer in range(2)]


def build_tensors(version: int, names: Mapping[str, Kind] = KINDS) -> dict[str, torch.Tensor]:
    """Every value of tensor i is 8 version + i, which bfloat16 has up to version 31."""
    return {
        name: torch.full(shape, 8.0 * version + number, dtype=DTYPES[dtype])
        for number, (name, (dtype, shape)) in enumerate(names.items())
    }


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


def compute_expected(directory: Path, checksums: Mapping[str, str]) -> Mapping[str, str]:
    weights = Weights(KINDS, DRAFT)
    weights.load(directory)
    return weights.compute_checksums()


class Cluster:
    """A rollout over servers that a test can break; faults and calls outlive a restart."""

    def __init__(self, folder: Path, count: int = 1, protocol: str = "old", **changes: Any) -> None:
        self.faults: list[list[Fault]] = [[] for _ in range(count)]
        self.calls: list[list[tuple[str, dict[str, Any]]]] = [[] for _ in range(count)]
        self.derived = changes.pop("derived", ())
        self.engine = changes.pop("engine", name_version)
        self.protocol = protocol
        self.launchers = [ContractLauncher(self._builder(number)) for number in range(count)]
        seconds = changes.pop("seconds", 30.0)
        self.replicas: list[Client] = [
            ServerReplica(
                f"replica {number}", launcher, seconds=seconds, start_seconds=seconds, backoff_seconds=0
            )
            for number, launcher in enumerate(self.launchers)
        ]
        table = NameTable({}, DRAFT, {})
        declared = {name: OutputTensor(name, *kind) for name, kind in KINDS.items()}
        self.folder = folder
        self.rollout = SGLangRollout(
            changes.pop("replicas", self.replicas),
            ServedModel(100, 64, changes.pop("declared", declared)),
            FilesTransport(folder, table, has_draft=True, file_bytes=changes.pop("file_bytes", 2**20)),
            changes.pop("expect", compute_expected),
            **changes,
        )

    def _builder(self, number: int):
        def build(keys: Keys) -> ContractServer:
            return ContractServer(
                Weights(KINDS, DRAFT, self.derived),
                self.engine,
                protocol=self.protocol,
                keys=keys,
                faults=self.faults[number],
                calls=self.calls[number],
            )

        return build

    def server(self, number: int = 0) -> ContractServer:
        server = self.launchers[number].server
        assert server is not None
        return server

    def paths(self, number: int = 0) -> list[str]:
        return [path for path, _ in self.calls[number]]

    def sync(self, version: int) -> None:
        self.rollout.sync(version, build_tensors(version).items())

    def ask(self) -> list[tuple[int, ...]]:
        return [answer.ids for answer in self.rollout.generate(REQUESTS, SAMPLING)]


@contextmanager
def run_cluster(folder: Path, count: int = 1, protocol: str = "old", **changes: Any):
    cluster = Cluster(folder, count, protocol, **changes)
    try:
        yield cluster
    finally:
        cluster.rollout.close()
