"""The order in which a replica takes a new version, and what becomes of it where a step fails.

serving -> paused -> flushed -> released -> sent -> verified -> versioned -> resumed -> serving. A replica
that failed in any step answers nothing until a sync has gone through from its beginning.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from bundle.errors import BundleError, JobFailed, format_bytes, format_count
from bundle.pretrained.directory import limit_violations
from bundle.weight_sync.transports.ipc import Bucket

# Where a draft model is served, "weights" may not be released: nothing brings the draft back (sglang#31674).
KV_CACHE = "kv_cache"
# Computes what the checksums of a server must be, as far as that is known, from those that it reports.
Expect = Callable[[Mapping[str, str]], Mapping[str, str]]
# Verify every version, or the first one that a server gets after its start.
Verify = Literal["always", "first"]


class Replica(Protocol):
    """A server as the steps see it. Every method raises BundleError where the server does not do it."""

    name: str
    can_restart: bool

    def is_alive(self) -> bool: ...
    def restart(self) -> None: ...
    def abort_and_pause(self) -> None: ...
    def flush(self) -> None: ...
    def release(self, tag: str) -> None: ...
    def load(self, directory: Path) -> None: ...
    def load_bucket(self, bucket: Bucket) -> None: ...
    def read_checksums(self) -> Mapping[str, str]: ...
    def reset_tensors(self) -> None: ...
    def set_version(self, version: str) -> None: ...
    def read_weight_version(self) -> str: ...
    def resume(self, tag: str) -> None: ...
    def unpause(self) -> None: ...


R = TypeVar("R", bound=Replica)


class Step(StrEnum):
    """The steps of a sync; the value says what has been done when it has gone through."""

    START = "started"
    PAUSE = "paused"
    FLUSH = "flushed"
    RELEASE = "released"
    COVER = "covered"
    SEND = "sent"
    VERIFY = "verified"
    VERSION = "versioned"
    RESUME = "resumed"
    SERVE = "serving"

    @property
    def action(self) -> str:
        """What is done in the step, in the words of a failure."""
        return _STEP_DESCRIPTIONS[self]


_STEP_DESCRIPTIONS = {
    Step.START: "start its server",
    Step.PAUSE: "pause its answers",
    Step.FLUSH: "flush its cache",
    Step.RELEASE: "release its KV cache",
    Step.COVER: "replace all tensors",
    Step.SEND: "receive the weights",
    Step.VERIFY: "verify the weights",
    Step.VERSION: "set its version",
    Step.RESUME: "resume its KV cache",
    Step.SERVE: "serve again",
}


class SyncFailed(JobFailed):
    """A replica failed in a step of a sync, or while it answered."""

    def __init__(self, replica: str, step: str, cause: BaseException) -> None:
        self.replica, self.step = replica, step
        reason, _, _ = str(cause).partition("\n")
        failure = f"to {step.action} in a weight sync" if isinstance(step, Step) else f"while {step}"
        super().__init__(
            f"rollout: {replica} failed {failure}. It gives no answers until the next full weight sync."
            f" The reason: {reason or type(cause).__name__}",
            cause.violations if isinstance(cause, BundleError) else (),
        )

    def list_failure_and_violations(self) -> list[str]:
        """Return what failed, then each violation."""
        return [str(self).partition("\n")[0], *self.violations]


class FreeMemoryWait(NamedTuple):
    """How the free memory of a device is read [bytes], how much the trainer needs, and how long it waits [s].

    A server may answer before the memory is free (slime#579), so that its reply counts for nothing.
    """

    read: Callable[[], int]
    needed: int
    seconds: float = 10.0

    def wait_until_trainer_fits(self) -> None:
        """Return when enough is free. Raise JobFailed after `seconds`."""
        deadline = time.monotonic() + self.seconds
        while (free := self.read()) < self.needed:
            if time.monotonic() > deadline:
                raise JobFailed(
                    f"only {format_bytes(free)} of device memory are free without the KV cache,"
                    f" but the trainer needs {format_bytes(self.needed)}. Lower train.micro_batch_size, or"
                    " serve on other devices (rl.rollout.urls)."
                )
            time.sleep(0.01)


class SyncedReplica(Generic[R]):
    """One replica and how far it is. `version` is what it answers with, None where it answers nothing.

    `failure` is why it answers nothing; it is None before the first sync, too.
    """

    def __init__(
        self, replica: R, *, memory: FreeMemoryWait | None = None, tags: tuple[str, ...] = ()
    ) -> None:
        """`tags` are released while the trainer learns on the same device, `memory` is read after that."""
        self.replica = replica
        self.version: int | None = None
        self.failure: SyncFailed | None = None
        # How long each step took [s], from the pause before the last sync on.
        self.seconds: dict[Step, float] = {}
        # Those that the server has released: to resume another one ends SGLang 0.5.16.
        self.released: set[str] = set()
        self._tags, self._memory = tags, memory
        # Whether its checksums have been verified since its server was started.
        self.is_proven = False
        self._reached: Step | None = None
        self._is_covered = False

    def fail(self, step: str, cause: BaseException) -> SyncFailed:
        """Take the replica out of use; return the error that names it."""
        self.version, self._reached = None, None
        self.failure = SyncFailed(self.replica.name, step, cause)
        return self.failure

    def pause_and_release_memory(self) -> None:
        """Pause, flush and release, so that the device is the trainer's until the next sync."""
        if self._reached is Step.RELEASE:
            return
        self.version = None
        if self._reached is not Step.START:
            self.seconds.clear()
        with self._step(Step.PAUSE):
            self.replica.abort_and_pause()
        # Updates say flush_cache: false. Old keys and values would answer for prompts that begin alike.
        with self._step(Step.FLUSH):
            self.replica.flush()
        with self._step(Step.RELEASE):
            for tag in self._tags:
                self.replica.release(tag)
                self.released.add(tag)
            if self._memory is not None:
                self._memory.wait_until_trainer_fits()

    def sync(
        self,
        version: int,
        load: Callable[[R], None],
        expect: Expect,
        verify: Verify = "always",
        *,
        proves_coverage: bool = False,
    ) -> None:
        """Take a whole version from its first step to its last. Raise SyncFailed where one fails.

        `load` makes the replica load the version, `expect` computes what its checksums must be, which are
        asked for by `verify`. The first sync proves that `load` replaces every tensor, and a later one that
        `proves_coverage`.
        """
        self.ensure_started_and_paused()
        before = None
        if proves_coverage or not self._is_covered:
            with self._step(Step.COVER):
                load(self.replica)
                before = self.replica.read_checksums()
                self.replica.reset_tensors()
        self.send(load)
        if before is not None:
            with self._step(Step.COVER):
                self._check_checksums_restored(before)
        self.verify_and_resume_serving(version, expect, verify)

    def ensure_started_and_paused(self) -> None:
        """Make the replica ready to load: started where it is not, paused, flushed and released.

        A replica that failed before is started anew, where that is in our hands.
        """
        if (self.failure is not None and self.replica.can_restart) or not self.replica.is_alive():
            self._reached = None
            self.seconds.clear()
            with self._step(Step.START):
                self.replica.restart()
                self.released.clear()
                self.is_proven = False
        self.pause_and_release_memory()

    def send(self, load: Callable[[R], None]) -> None:
        """Load a version, or a part of it."""
        with self._step(Step.SEND):
            load(self.replica)

    def verify_and_resume_serving(self, version: int, expect: Expect, verify: Verify = "always") -> None:
        """Verify what was sent, name it and serve it."""
        if verify == "always" or not self.is_proven:
            with self._step(Step.VERIFY):
                self._verify(expect)
                self.is_proven = True
        with self._step(Step.VERSION):
            self.replica.set_version(str(version))
            if (reported := self.replica.read_weight_version()) != str(version):
                raise JobFailed(f"it reports version {reported}, not {version}.")
        with self._step(Step.RESUME):
            for tag in sorted(self.released):
                self.replica.resume(tag)
            self.released.clear()
        with self._step(Step.SERVE):
            self.replica.unpause()
        self.version, self.failure = version, None

    def _check_checksums_restored(self, before: Mapping[str, str]) -> None:
        """Raise JobFailed with the tensors that stayed noise; `before` are the checksums before it."""
        after = self.replica.read_checksums()
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        if changed:
            raise JobFailed(
                f"a weight sync does not replace {len(changed)} of the server's"
                f" {format_count(len(after), 'tensor')}. Serve"
                " the model that is trained, with its draft model.",
                limit_violations(changed),
            )
        self._is_covered = True

    def _verify(self, expect: Expect) -> None:
        """Raise JobFailed where checksums are not those of what was sent."""
        checksums = self.replica.read_checksums()
        expected = expect(checksums)
        wrong = sorted(name for name, value in expected.items() if checksums.get(name) != value)
        if wrong:
            raise JobFailed(
                f"{len(wrong)} of its {format_count(len(expected), 'tensor')}"
                f" {'differs' if len(wrong) == 1 else 'differ'} from what was sent.",
                limit_violations(wrong),
            )

    @contextmanager
    def _step(self, step: Step) -> Iterator[None]:
        """Record that a step succeeded; take the replica out of use where it failed."""
        started = time.monotonic()
        try:
            yield
        except JobFailed as error:
            raise self.fail(step, error) from error
        except BaseException as error:
            self.fail(step, error)
            raise
        self._reached = step
        self.seconds[step] = self.seconds.get(step, 0.0) + time.monotonic() - started
