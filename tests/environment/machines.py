"""Machines for tests: recorded directories, and answers of the vendors' tools."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from bundle.environment.machine import DetectedValue, Machine, to_printable

FIXTURES = Path(__file__).parent / "fixtures"


def recorded(name: str, environ: Mapping[str, str] | None = None, silent: Sequence[str] = ()) -> Machine:
    """The machine in fixtures/<name>; tools named in `silent` fail as if they were not installed."""
    return machine_at(FIXTURES / name, environ, silent)


def machine_at(
    directory: Path, environ: Mapping[str, str] | None = None, silent: Sequence[str] = ()
) -> Machine:
    def run(command: Sequence[str]) -> DetectedValue[str]:
        shown = " ".join(command)
        file = directory / "commands" / (shown.split("=")[0].replace(" ", "_") + ".txt")
        if command[0] in silent or not file.exists():
            return DetectedValue(None, f"{command[0]} is not on PATH")
        return DetectedValue(to_printable(file.read_bytes()), f"`{shown}`")

    return Machine(directory / "root", environ or {}, run)


def merged(directory: Path, *names: str) -> Path:
    """One machine that has everything of several recorded ones."""
    for name in names:
        shutil.copytree(FIXTURES / name, directory, dirs_exist_ok=True)
    return directory
