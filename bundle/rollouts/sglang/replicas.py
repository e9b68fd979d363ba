"""The servers of a run, and how each version of the weights comes to them: by files, or in buckets."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bundle.errors import JobFailed
from bundle.pretrained.writing import OutputTensorHeader
from bundle.rollouts.sglang.checksums import ExpectedChecksumSource
from bundle.rollouts.sglang.client import Client
from bundle.weight_sync.manifest import Manifest
from bundle.weight_sync.states import (
    KV_CACHE,
    Expect,
    FreeMemoryWait,
    Step,
    SyncedReplica,
    SyncFailed,
    Verify,
)
from bundle.weight_sync.transports.files import FilesTransport, WrittenWeights
from bundle.weight_sync.transports.ipc import Bucket, build_module_aligned_buckets, send_buckets_in_background

_log = logging.getLogger(__name__)
# Checksums after every sync may take this share of the time from one sync to the next, or so many seconds.
_VERIFY_SHARE, _VERIFY_SECONDS = 0.02, 0.5


class Replicas:
    """All replicas and the weights that they have; `version` is None while none may answer.

    The first version comes by files, which prove that all of it arrives. Where a device of buckets is named,
    the same version comes in buckets, too; the next ones do where that gave the same checksums.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        declared: Mapping[str, OutputTensorHeader],
        files: FilesTransport,
        checksums: ExpectedChecksumSource,
        *,
        verify: Verify = "always",
        memory: FreeMemoryWait | None = None,
        bucket_device: torch.device | None = None,
    ) -> None:
        """`declared` are the tensors that the servers' checkpoint names.

        `bucket_device` is where buckets lie; None: all versions come by files.
        """
        self.version: int | None = None
        # Whether another sync of the same version mends the last error.
        self.can_recover_by_resync = False
        self.all = [
            SyncedReplica(client, memory=memory, tags=(KV_CACHE,) if client.can_restart else ())
            for client in clients
        ]
        self._declared, self._files, self._checksums = declared, files, checksums
        self._verify: Verify = verify
        self._bucket_device = bucket_device
        self._synced_at: float | None = None
        self._weights: WrittenWeights | None = None
        self._bucket_manifest: Manifest | None = None

    @property
    def usable(self) -> list[SyncedReplica[Client]]:
        """Those that have the version."""
        return [sync for sync in self.all if sync.version is not None and sync.version == self.version]

    def sync(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send these published tensors to all replicas, all of which are taken from the iterable.

        A replica that fails is left out until the next sync. Raise JobFailed where none takes them.
        """
        self.version, self.can_recover_by_resync = None, False
        if self._bucket_manifest is not None:
            self._weights = None
            self._send_buckets(version, tensors, self._bucket_manifest)
            return
        weights = self._files.write(version, tensors)
        weights.manifest.check_server_tensors(self._declared)
        self._weights = weights
        self._load_files(weights)
        self._files.remove_others(weights.directory)
        if self._bucket_device is not None:
            self._try_bucket_transport(weights, self._bucket_device)

    def reload_lost_weights(self) -> None:
        """Load the version again, where no replica has it. Raise JobFailed where none takes it."""
        if self._weights is None:
            self.version, self.can_recover_by_resync = None, True
            raise JobFailed("rollout: no server has the weights any more, and no file has them.")
        self._load_files(self._weights)

    def release_cache_until_sync(self) -> None:
        """Pause the servers and release their KV cache."""
        self.version = None
        for sync in self.all:
            if sync.version is not None:
                try:
                    sync.pause_and_release_memory()
                except JobFailed as error:
                    _log.error("%s", error)

    def close(self) -> None:
        """End the servers that the run has started, and remove the files."""
        self.version = None
        for sync in self.all:
            sync.replica.stop_owned_server()
        self._checksums.close()
        self._files.close()

    def _load_files(self, weights: WrittenWeights) -> None:
        """Sync all replicas at once, and a second time where all fail.

        Raise JobFailed where none serves then.
        """
        version = weights.manifest.version

        def load(sync: SyncedReplica[Client]) -> None:
            expect = self._bind_checksum_computation(weights.directory)
            sync.sync(version, lambda replica: replica.load(weights.directory), expect, self._verify)

        for _ in range(2):
            if _attempt_concurrently(load, self.all):
                break
        else:
            raise self._build_error(version)
        self._record_sync_downgrading_slow_verify(version)

    def _try_bucket_transport(self, weights: WrittenWeights, device: torch.device) -> None:
        """Send a version that all have by files once more, in buckets; use these from then on, or never."""
        version, usable = weights.manifest.version, self.usable

        def load(replica: Client) -> None:
            send_buckets_in_background(
                build_module_aligned_buckets(weights.read_tensors(device)), replica.load_bucket
            )

        expect = self._bind_checksum_computation(weights.directory)
        proven = _attempt_concurrently(
            lambda sync: sync.sync(version, load, expect, proves_coverage=True), usable
        )
        if len(proven) < len(usable):
            self._switch_all_to_files(usable)
            self._load_files(weights)
            return
        self._bucket_manifest, self._weights = weights.manifest, None
        self._files.remove_others(None)

    def _send_buckets(self, version: int, tensors: Iterable[tuple[str, Tensor]], manifest: Manifest) -> None:
        """Send a version in buckets; each goes to all replicas before the next one."""
        prepared = ready = _attempt_concurrently(SyncedReplica.ensure_started_and_paused, self.all)
        needs_proof = self._verify == "always" or not all(sync.is_proven for sync in prepared)
        taking_seconds = 0.0

        def load(bucket: Bucket) -> None:
            nonlocal ready, taking_seconds
            ready = _attempt_concurrently(
                lambda sync: sync.send(lambda replica: replica.load_bucket(bucket)), ready
            )
            started = time.monotonic()
            if needs_proof and ready:
                self._checksums.submit_bucket(bucket)
            taking_seconds += time.monotonic() - started

        stream = iter(tensors)
        try:
            send_buckets_in_background(
                build_module_aligned_buckets(manifest.check_and_filter_tensors(stream)), load
            )
        except BaseException as error:
            for sync in ready:
                sync.fail(Step.SEND, error)
            self._switch_all_to_files(prepared)
            self.can_recover_by_resync = isinstance(error, JobFailed)
            raise
        finally:
            for _ in stream:
                pass
        finished = _attempt_concurrently(
            lambda sync: sync.verify_and_resume_serving(
                version, self._bind_checksum_computation(None), self._verify
            ),
            ready,
        )
        if len(finished) < len(prepared):
            self._switch_all_to_files(prepared)
        if not finished:
            self.can_recover_by_resync = True
            raise self._build_error(version)
        self._record_sync_downgrading_slow_verify(version, taking_seconds)

    def _bind_checksum_computation(self, directory: Path | None) -> Expect:
        return partial(self._checksums.compute_expected_checksums, directory)

    def _switch_all_to_files(self, syncs: Sequence[SyncedReplica[Client]]) -> None:
        """Use files from now on, and say why."""
        reasons = [str(sync.failure) for sync in syncs if sync.failure is not None]
        _log.warning(
            "rl.rollout.transport: switching to files: %s", "; ".join(reasons) or "no server was ready"
        )
        self._bucket_device = self._bucket_manifest = None

    def _build_error(self, version: int) -> JobFailed:
        failures = [sync.failure for sync in self.all if sync.failure is not None]
        lines = [line for failure in failures for line in failure.list_failure_and_violations()]
        return JobFailed(f"rollout: no server loaded version {version} of the weights.", lines)

    def _record_sync_downgrading_slow_verify(self, version: int, taking_seconds: float = 0.0) -> None:
        """Count a successful sync; ask for no more checksums where they take too long."""
        now, is_first = time.monotonic(), self._synced_at is None
        self.version = version
        for sync in self.all:
            if is_first and sync.failure is None:
                steps = ", ".join(f"{step} {seconds:.3f}" for step, seconds in sync.seconds.items())
                _log.info("rollout: %s serves version %d; seconds: %s", sync.replica.name, version, steps)
        seconds = taking_seconds + max(sync.seconds.get(Step.VERIFY, 0.0) for sync in self.all)
        step_seconds = now - (self._synced_at or now)
        if (
            self._verify == "always"
            and not is_first
            and seconds > max(_VERIFY_SECONDS, _VERIFY_SHARE * step_seconds)
        ):
            _log.warning(
                "rl.rollout.verify: switching to first: checksums took %.1f s of a step of %.1f s",
                seconds,
                step_seconds,
            )
            self._verify = "first"
        self._synced_at = now


def _attempt_concurrently(
    action: Callable[[SyncedReplica[Client]], None], syncs: Sequence[SyncedReplica[Client]]
) -> list[SyncedReplica[Client]]:
    """Do this with all replicas at once; return those where it has gone through, and log why others fail."""

    def attempt(sync: SyncedReplica[Client]) -> bool:
        try:
            action(sync)
        except SyncFailed as error:
            _log.error("%s", error)
            return False
        return True

    if not syncs:
        return []
    with ThreadPoolExecutor(len(syncs)) as pool:
        return [sync for sync, is_done in zip(syncs, pool.map(attempt, syncs), strict=True) if is_done]
