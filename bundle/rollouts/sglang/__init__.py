"""Answers by servers of SGLang, which get the weights of every version whole or are not asked."""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bundle.errors import JobFailed, UsageError
from bundle.pretrained.writing import OutputTensor
from bundle.rollouts import Answer, Request, Sampling
from bundle.rollouts.sglang.checksums import HashHelper
from bundle.rollouts.sglang.client import Client
from bundle.rollouts.sglang.protocol import build_generate, read_answer
from bundle.weight_sync.states import KV_CACHE, Expect, FreeMemoryWait, ReplicaSync, Step, SyncFailed
from bundle.weight_sync.transports.files import FilesTransport, WrittenWeights

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)
_REQUESTS_IN_FLIGHT = 512  # a process may often open no more than 1024 files
_ATTEMPTS = 4  # at the answers of one call
# Checksums after every sync may take this share of the time from one sync to the next, or so many seconds.
_VERIFY_SHARE, _VERIFY_SECONDS = 0.02, 0.5


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the servers must serve. `declared` are the tensors that their checkpoint names."""

    vocab_size: int
    context_length: int
    declared: Mapping[str, OutputTensor]


class SGLangRollout:
    """A rollout engine with replicas in servers (`Rollout`); `version` is None while none may answer."""

    def __init__(
        self,
        replicas: Sequence[Client],
        model: ServedModel,
        transport: FilesTransport,
        expect: Expect,
        *,
        verify: Literal["always", "first"] = "always",
        memory: FreeMemoryWait | None = None,
    ) -> None:
        """`expect` computes checksums (`weight_sync.states`), `memory` is what the trainer needs to learn.

        Replicas that are not started yet are started by the first sync.
        """
        self.version: int | None = None
        self._model, self._transport, self._expect = model, transport, expect
        self._verify: str = verify
        self._synced_at: float | None = None
        self._weights: WrittenWeights | None = None
        self._syncs = [
            ReplicaSync(replica, memory=memory, tags=(KV_CACHE,) if replica.can_restart else ())
            for replica in replicas
        ]

    def sync(self, version: int, tensors: "Iterable[tuple[str, Tensor]]") -> None:
        """Send these published tensors to all replicas. Raise JobFailed where none takes them.

        All of them are taken and compared with what the servers declare before any server is paused. A
        replica that fails is left out until the next sync.
        """
        self.version = None
        weights = self._transport.write(version, tensors)
        weights.manifest.check_names(self._model.declared)
        self._weights = weights
        self._bring(weights)
        self._transport.remove_others(weights.directory)

    def rest(self) -> None:
        """Pause the servers and release their KV cache, so that the device is the trainer's."""
        self.version = None
        for sync in self._syncs:
            if sync.version is not None:
                try:
                    sync.rest()
                except JobFailed as error:
                    _log.error("%s", error)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Answer]:
        """Return an answer to each request, in their order.

        A replica that fails costs its own answers, which others are asked for; where none is left, one is
        started anew with the same weights. Raise JobFailed without weights, and where that does not help.
        """
        if self.version is None or self._weights is None:
            raise JobFailed("rollout: the servers have no weights. Call sync before generate.")
        self._check(requests, sampling)
        answers: dict[int, Answer] = {}
        missing = list(range(len(requests)))
        for _ in range(_ATTEMPTS):
            if not missing:
                break
            if not self._usable:
                self._bring(self._weights)
            answers |= asyncio.run(self._ask_all(requests, sampling, missing, answers))
            missing = [
                number
                for number in missing
                if number not in answers or answers[number].finish_reason == "abort"
            ]
        if not missing:
            return [answers[number] for number in range(len(requests))]
        failures = [str(sync.failure) for sync in self._syncs if sync.failure is not None]
        raise JobFailed(
            f"rollout: {len(missing)} of {len(requests)} answers are missing after {_ATTEMPTS} attempts.",
            failures,
        )

    def close(self) -> None:
        """End the servers that the run has started, and remove the files."""
        self.version = None
        for sync in self._syncs:
            sync.replica.close()
        if isinstance(self._expect, HashHelper):
            self._expect.close()
        self._transport.close()

    @property
    def _usable(self) -> list[ReplicaSync[Client]]:
        return [sync for sync in self._syncs if sync.version is not None and sync.version == self.version]

    def _bring(self, weights: WrittenWeights) -> None:
        """Sync all replicas at once; once more where all fail. Raise JobFailed where none serves then."""
        version, now = weights.manifest.version, time.monotonic()
        is_first = self._synced_at is None

        def bring(sync: ReplicaSync[Client]) -> SyncFailed | None:
            needs_proof = is_first or self._verify == "always" or sync.failure is not None
            try:
                sync.sync(version, weights.directory, self._expect if needs_proof else None)
            except SyncFailed as error:
                _log.error("%s", error)
                return error
            return None

        for _ in range(2):
            with ThreadPoolExecutor(len(self._syncs)) as pool:
                failures = [failure for failure in pool.map(bring, self._syncs) if failure is not None]
            if len(failures) < len(self._syncs):
                break
        else:
            lines = [line for failure in failures for line in failure.list_lines()]
            raise JobFailed(f"rollout: no server has taken version {version}.", lines)
        self.version = version
        for sync in self._syncs:
            if is_first and sync.failure is None:
                steps = ", ".join(f"{step} {seconds:.3f}" for step, seconds in sync.seconds.items())
                _log.info("rollout: %s serves version %d; seconds: %s", sync.replica.name, version, steps)
        seconds = max(sync.seconds.get(Step.VERIFY, 0.0) for sync in self._syncs)
        step_seconds = now - (self._synced_at or now)
        if (
            self._verify == "always"
            and not is_first
            and seconds > max(_VERIFY_SECONDS, _VERIFY_SHARE * step_seconds)
        ):
            _log.warning(
                "rl.rollout.verify: first from now on: checksums took %.1f s of a step of %.1f s",
                seconds,
                step_seconds,
            )
            self._verify = "first"
        self._synced_at = now

    async def _ask_all(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        missing: Sequence[int],
        partials: Mapping[int, Answer],
    ) -> dict[int, Answer]:
        """Return the answers to the requests with these numbers, as far as there are any."""
        usable, version = self._usable, self.version
        assert version is not None
        limit = asyncio.Semaphore(_REQUESTS_IN_FLIGHT)

        async def ask(number: int) -> tuple[int, Answer | None]:
            request, partial = requests[number], partials.get(number)
            sync = usable[request.question % len(usable)]  # answers to one question share their prompt
            async with limit:
                if sync.version != version:
                    return number, partial
                try:
                    reply = await sync.replica.request(build_generate(request, sampling, partial))
                    answer = read_answer(
                        reply, request, sampling, partial, version=version, vocab_size=self._model.vocab_size
                    )
                except JobFailed as error:
                    if sync.failure is None:
                        _log.error("%s", sync.fail("answering", error))
                    return number, partial
                # What it answers after a fault counts for nothing.
                return number, answer if sync.version == version else partial

        pairs = await asyncio.gather(*(ask(number) for number in missing))
        return {number: answer for number, answer in pairs if answer is not None}

    def _check(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Raise UsageError for requests that the model cannot read or finish."""
        limit = self._model.context_length - sampling.max_completion_length
        problems = []
        for request in requests:
            if not request.ids or not 0 <= min(request.ids) <= max(request.ids) < self._model.vocab_size:
                problems.append(
                    f"question {request.question}: it is empty, or has a token outside the vocabulary of"
                    f" {self._model.vocab_size}"
                )
            if len(request.ids) > limit:
                problems.append(
                    f"question {request.question}: {len(request.ids)} tokens and an answer of"
                    f" {sampling.max_completion_length} exceed the context of {self._model.context_length}"
                )
        if problems:
            raise UsageError(
                "rollout: the servers cannot answer these questions.", list(dict.fromkeys(problems))
            )


class FirstReplicaChecksums:
    """Expects of all replicas what the first one reports: where no other checksums can be computed."""

    def __init__(self) -> None:
        self._checksums: dict[Path, Mapping[str, str]] = {}

    def __call__(self, directory: Path, checksums: Mapping[str, str]) -> Mapping[str, str]:
        """Return the checksums that were reported first for these files."""
        return self._checksums.setdefault(directory, checksums)
