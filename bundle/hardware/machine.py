"""The thin edge: everything detection may touch is a root directory, an environment and a command runner."""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bundle.frozen import frozen
from bundle.hardware.facts import Fact

Run = Callable[[Sequence[str]], Fact[str]]

# A driver in trouble can keep its tool waiting for minutes; a healthy one answers in well under a second.
TIMEOUT = 10.0


@frozen
class Machine:
    """A machine to look at: the real one, or a directory and recorded answers that stand for one."""

    root: Path
    environ: Mapping[str, str]
    run: Run

    def read(self, path: str) -> Fact[str]:
        """The text of the file at the absolute `path` under the root, or why there is none."""
        try:
            return Fact((self.root / path.lstrip("/")).read_text(errors="replace"), path)
        except OSError as error:
            return Fact(None, f"{path}: {error.strerror}")

    def names(self, directory: str) -> tuple[str, ...]:
        """The sorted names in a directory; none if it does not exist or may not be read."""
        try:
            return tuple(sorted(entry.name for entry in (self.root / directory.lstrip("/")).iterdir()))
        except OSError:
            return ()


def local() -> Machine:
    """The machine this process runs on."""
    return Machine(Path("/"), os.environ, run_command)


def run_command(command: Sequence[str]) -> Fact[str]:
    """The command's output, or why there is none: missing, failed, or no answer in time."""
    shown = " ".join(command)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError:
        return Fact(None, f"{command[0]} is not on PATH")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Fact(None, f"`{shown}`: {error}")
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        return Fact(None, f"`{shown}` ended with {done.returncode}: {said[0] if said else 'it said nothing'}")
    return Fact(done.stdout, f"`{shown}`")
