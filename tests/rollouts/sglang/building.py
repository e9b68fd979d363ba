"""Rollouts over contract servers in this process, whose answers say of which weights they are."""

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bundle.pretrained.writing import OutputTensorHeader
from bundle.rollouts import Request, Sampling
from bundle.rollouts.sglang import ServedModel, SGLangRollout
from bundle.rollouts.sglang.client import Client, Keys
from bundle.rollouts.sglang.replicas import Replicas
from bundle.rollouts.sglang.server import ServerReplica
from bundle.weight_sync.manifest import ExpectedTensors
from bundle.weight_sync.transports.files import FilesTransport
from bundle.weight_sync.transports.ipc import Bucket
from tests.rollouts.sglang.contract_server import ContractServer, Fault
from tests.rollouts.sglang.contract_weights import DRAFT, KINDS, Kind, Weights, name_version, read_bucket

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
SAMPLING = Sampling(temperature=1.0, max_completion_length=3, stop=(), seed=1, step=1)
REQUESTS = [Request((1, 2, question), question, answer) for question in range(4) for answer in range(2)]


def build_tensors(version: int, names: Mapping[str, Kind] = KINDS) -> dict[str, torch.Tensor]:
    """Every value of tensor i is 8 version + i, which bfloat16 has up to version 31."""
    return {
        name: torch.full(shape, 8.0 * version + number, dtype=DTYPES[dtype])
        for number, (name, (dtype, shape)) in enumerate(names.items())
    }


class Checksums:
    """Loads what was sent as a server does (`ExpectedChecksumSource`), apart from it."""

    def __init__(self, kinds: Mapping[str, Kind] = KINDS) -> None:
        self.kinds = kinds
        self.entries: list[Any] = []
        self.is_computed = False

    def compute_expected_checksums(
        self, directory: Path | None, checksums: Mapping[str, str]
    ) -> Mapping[str, str]:
        weights = Weights(self.kinds, DRAFT)
        if directory is not None:
            weights.load(directory)
        else:
            weights.load_entries(self.entries)
        self.is_computed = True
        return weights.compute_checksums()

    def submit_bucket(self, bucket: Bucket) -> None:
        if self.is_computed:
            self.entries, self.is_computed = [], False
        self.entries += read_bucket(bucket.share())

    def close(self) -> None:
        """Nothing to end."""


class ContractLauncher:
    """Starts contract servers in this process (`Launcher`); `server` is the last one."""

    def __init__(self, build: Callable[[Any], ContractServer]) -> None:
        self.keys = Keys()
        self.server: ContractServer | None = None
        self.starts = 0
        self._build = build

    def start(self) -> str:
        self.stop()
        self.starts += 1
        self.keys = Keys(f"api-{self.starts}", f"admin-{self.starts}")
        self.server = self._build(self.keys)
        return self.server.url

    def wait(self, seconds: float) -> bool:
        return self.server is None or self.server.is_dead.wait(seconds)

    def read_tail(self) -> list[str]:
        return [self.keys.hide(line) for line in self.server.lines] if self.server else []

    def stop(self) -> None:
        if self.server is not None and not self.server.is_dead.is_set():
            self.server.die("stopped")
        self.server = None


class Cluster:
    """A rollout over servers that a test can break; faults and calls outlive a restart."""

    def __init__(self, folder: Path, count: int = 1, protocol: str = "old", **changes: Any) -> None:
        self.faults: list[list[Fault]] = [[] for _ in range(count)]
        self.calls: list[list[tuple[str, dict[str, Any]]]] = [[] for _ in range(count)]
        self.derived = changes.pop("derived", ())
        has_draft = changes.pop("has_draft", True)
        self.kinds = {name: kind for name, kind in KINDS.items() if has_draft or name not in DRAFT}
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
        table = ExpectedTensors({}, DRAFT, {})
        declared = {name: OutputTensorHeader(name, *kind) for name, kind in self.kinds.items()}
        self.folder = folder
        self.rollout = SGLangRollout(
            Replicas(
                changes.pop("replicas", self.replicas),
                changes.pop("declared", declared),
                FilesTransport(
                    folder, table, has_draft=has_draft, file_bytes=changes.pop("file_bytes", 2**20)
                ),
                changes.pop("checksums", None) or Checksums(self.kinds),
                **changes,
            ),
            ServedModel(100, 64),
        )

    def _builder(self, number: int):
        def build(keys: Keys) -> ContractServer:
            return ContractServer(
                Weights(self.kinds, DRAFT, self.derived),
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
