"""What a rollout engine promises: answers with the log-probability and the weights version of every token.

Nothing here imports torch, so that rewards and loops without an engine can name these types.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from bundle.errors import JobFailed, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Request:
    """One answer that is to be sampled.

    `ids` are the rendered question. `question` is its row number in the data set, and `answer` counts the
    answers to it from 0: both are keys of the random numbers.
    """

    ids: tuple[int, ...]
    question: int
    answer: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. `stop` are the ids that end an answer; `seed` and `step` key the random numbers.

    `greedy` takes the likeliest token; log-probabilities stay those at `temperature`.
    """

    temperature: float
    max_completion_length: int
    stop: tuple[int, ...]
    seed: int
    step: int
    greedy: bool = False

    def __post_init__(self) -> None:
        """Raise UsageError with every value that no sampler can take."""
        violations = []
        if not 0 < self.temperature < float("inf"):
            violations.append(
                f"temperature: {self.temperature} is not allowed. Set it above 0; use greedy for the"
                " likeliest token."
            )
        if self.max_completion_length < 1:
            violations.append(
                f"max_completion_length: {self.max_completion_length} is not allowed. Set it to 1 or more."
            )
        if violations:
            raise UsageError("rl.rollout: the sampling settings are not valid", violations)


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The tokens of one answer, with the stop token if there is one; all arrays are [len(ids)].

    `log_probs` are over the vocabulary at the sampling temperature; `versions` are those of the weights that
    drew each token.
    """

    question: int
    answer: int
    ids: tuple[int, ...]
    log_probs: "NDArray[np.float32]"
    versions: "NDArray[np.int32]"
    finish_reason: FinishReason


class SyncOnlyRollout:
    """What a rank has whose questions another rank asks: it takes part in syncs (`Rollout`)."""

    version: int | None = None
    can_recover_by_resync = False

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Answer]:
        """Raise JobFailed: another rank asks."""
        raise JobFailed("rollout: this rank has no questions. Report it with the recipe.")

    def sync(self, version: int, tensors: "Iterable[tuple[str, Tensor]]") -> None:
        """Send what this rank holds of the tensors."""
        for _ in tensors:
            pass
        self.version = version

    def release_cache_until_sync(self) -> None:
        """Forget the version, as the rank does that asks."""
        self.version = None

    def close(self) -> None:
        """Do nothing."""


class Rollout(Protocol):
    """An engine that answers with the weights of its last sync; `version` is None before the first one."""

    @property
    def version(self) -> int | None: ...

    @property
    def can_recover_by_resync(self) -> bool:
        """True if another sync of the same weights mends the last error."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Answer]:
        """Return an answer to each request, in their order. Raise JobFailed before the first sync."""

    def sync(self, version: int, tensors: "Iterable[tuple[str, Tensor]]") -> None:
        """Replace all weights by these published tensors.

        After an error it answers with the old version, or raises until a sync has succeeded.
        """

    def release_cache_until_sync(self) -> None:
        """Leave the device to the trainer, as far as that is possible, until the next sync."""

    def close(self) -> None:
        """Release the weights."""
