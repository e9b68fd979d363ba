"""Answers by servers of SGLang, which get the weights of every version whole or are not asked."""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bundle.errors import JobFailed, UsageError, format_count
from bundle.rollouts import Answer, Request, Sampling
from bundle.rollouts.sglang.protocol import build_generate, read_answer
from bundle.rollouts.sglang.replicas import Replicas

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)
_REQUESTS_IN_FLIGHT = 512  # a process may often open no more than 1024 files
_ANSWER_ATTEMPTS = 4  # at the answers of one call


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What of the model limits requests: ids, and tokens of a question with its answer."""

    vocab_size: int
    context_length: int


class SGLangRollout:
    """A rollout engine with replicas in servers (`Rollout`)."""

    def __init__(self, replicas: Replicas, model: ServedModel) -> None:
        """Replicas that are not started yet are started by the first sync."""
        self._replicas, self._model = replicas, model

    @property
    def version(self) -> int | None:
        """The version that the servers answer with."""
        return self._replicas.version

    @property
    def can_recover_by_resync(self) -> bool:
        """True if another sync of the same version mends the last error."""
        return self._replicas.can_recover_by_resync

    def sync(self, version: int, tensors: "Iterable[tuple[str, Tensor]]") -> None:
        """Send these published tensors to all replicas. Raise JobFailed where none takes them.

        Names are compared with what the servers declare before any server is paused. A replica that fails is
        left out until the next sync.
        """
        self._replicas.sync(version, tensors)

    def release_cache_until_sync(self) -> None:
        """Pause the servers and release their KV cache, so that the device is the trainer's."""
        self._replicas.release_cache_until_sync()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Answer]:
        """Return an answer to each request, in their order.

        A replica that fails costs its own answers, which others are asked for; where none is left, one is
        started anew with the same weights. Raise JobFailed without weights, and where that does not help.
        """
        if self.version is None:
            raise JobFailed("rollout: the servers have no weights. Call sync before generate.")
        self._check(requests, sampling)
        answers: dict[int, Answer] = {}
        missing = list(range(len(requests)))
        for _ in range(_ANSWER_ATTEMPTS):
            if not missing:
                break
            if not self._replicas.usable:
                self._replicas.reload_lost_weights()
            answers |= asyncio.run(self._ask_all(requests, sampling, missing, answers))
            missing = [
                number
                for number in missing
                if number not in answers or answers[number].finish_reason == "abort"
            ]
        if not missing:
            return [answers[number] for number in range(len(requests))]
        failures = [str(sync.failure) for sync in self._replicas.all if sync.failure is not None]
        raise JobFailed(
            f"rollout: {len(missing)} of {format_count(len(requests), 'answer')}"
            f" {'is' if len(missing) == 1 else 'are'} missing after {_ANSWER_ATTEMPTS} attempts.",
            failures,
        )

    def close(self) -> None:
        """End the servers that the run has started, and remove the files."""
        self._replicas.close()

    async def _ask_all(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        missing: Sequence[int],
        partials: Mapping[int, Answer],
    ) -> dict[int, Answer]:
        """Return the answers to the requests with these numbers, as far as there are any."""
        usable, version = self._replicas.usable, self.version
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
            size = self._model.vocab_size
            if not request.ids:
                problems.append(f"question {request.question}: it has no tokens")
            elif not 0 <= min(request.ids) <= max(request.ids) < size:
                token = min(request.ids) if min(request.ids) < 0 else max(request.ids)
                problems.append(
                    f"question {request.question}: token {token} is outside the vocabulary (size {size})"
                )
            if len(request.ids) > limit:
                problems.append(
                    f"question {request.question}: {len(request.ids)} tokens plus an answer of"
                    f" {sampling.max_completion_length} exceed the context length"
                    f" {self._model.context_length}"
                )
        if problems:
            raise UsageError(
                "rollout: the servers cannot answer these questions.", list(dict.fromkeys(problems))
            )
