"""The thin edge: everything detection may touch is a root directory, an environment and a command runner."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bundle import files
from bundle.frozen import frozen
from bundle.hardware.facts import Fact
from bundle.hardware.tool import run_command

Run = Callable[[Sequence[str]], Fact[str]]

# The mounts of a busy Kubernetes node are the longest text that is read: some hundred kilobytes.
LARGEST_FILE = 2**22


@frozen
class Machine:
    """A machine to look at: the real one, or a directory and recorded answers that stand for one."""

    root: Path
    environ: Mapping[str, str]
    run: Run

    def read(self, path: str) -> Fact[str]:
        """The text of the file at the absolute `path` under the root, or why there is none."""
        try:
            data = files.content(self.root / path.lstrip("/"), LARGEST_FILE)
            return Fact(data.decode(errors="replace"), path)
        except OSError as error:
            return Fact(None, f"{path}: {error.strerror}")

    def names(self, directory: str) -> tuple[str, ...]:
        """The sorted names in a directory; none if it does not exist or may not be read."""
        try:
            return tuple(sorted(entry.name for entry in (self.root / directory.lstrip("/")).iterdir()))
        except (OSError, ValueError):  # not there, not ours to read, or no name at all
            return ()


def local() -> Machine:
    """The machine this process runs on."""
    return Machine(Path("/"), os.environ, run_command)
