"""Containers of an image under the strictest rules that a cluster sets, removed at the end."""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.images.engine import Engine, Result

# Not root, nothing of root's, nothing to write to but the volume at HOME.
STRICT = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--shm-size=1g")
HOME = "/home/bundle"


@dataclass(frozen=True)
class Container:
    """A container that was started in the background."""

    engine: Engine
    name: str

    def wait(self, seconds: float = 300) -> int:
        """Returns the code that it ends with."""
        return int(self.engine.docker("wait", self.name, seconds=seconds))

    def logs(self) -> str:
        """Returns all that it has printed."""
        result = self.engine.attempt("logs", self.name)
        return result.out + result.err

    def wait_for(self, words: str, seconds: float = 120) -> None:
        """Returns when it has printed `words`; fails when it has ended before, or in time."""
        deadline = time.monotonic() + seconds
        while words not in self.logs():
            running = self.engine.docker("inspect", "--format={{.State.Running}}", self.name).strip()
            assert running == "true" and time.monotonic() < deadline, self.logs()
            time.sleep(0.2)


def run(
    engine: Engine, image: str, *words: str, options: tuple[str, ...] = (), seconds: float = 300
) -> Result:
    """Returns how `words` ended in a container of their own that no network reaches."""
    strict = ("run", "--rm", "--network=none", *STRICT, *options)
    return engine.attempt(*strict, image, *words, seconds=seconds)


@contextmanager
def started(engine: Engine, image: str, *words: str, options: tuple[str, ...]) -> Iterator[Container]:
    """Yields a container in the background, and removes it at the end."""
    name = _new()
    engine.docker("run", "--detach", f"--name={name}", *STRICT, *options, image, *words)
    try:
        yield Container(engine, name)
    finally:
        engine.docker("rm", "--force", "--volumes", name)


@contextmanager
def volume(engine: Engine) -> Iterator[str]:
    """Yields a new volume's name."""
    name = _new()
    engine.docker("volume", "create", name)
    try:
        yield name
    finally:
        engine.docker("volume", "rm", "--force", name)


@contextmanager
def network(engine: Engine) -> Iterator[str]:
    """Yields the name of a new network with its own names, and without a way out."""
    name = _new()
    engine.docker("network", "create", "--internal", name)
    try:
        yield name
    finally:
        engine.docker("network", "rm", name)


def _new() -> str:
    """Returns a name that nothing has: a run of the tests that was killed may have left something."""
    return f"test-{uuid.uuid4().hex[:12]}"
