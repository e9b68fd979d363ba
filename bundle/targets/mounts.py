"""What a container is shown of this machine's disks, and which inputs of a job it would not find there."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from bundle import files
from bundle.launch.job import Job
from bundle.planning.inputs import find_local_inputs


class Mount(NamedTuple):
    """A directory or file of a container. `source`: what it is of this machine; None: nothing of it."""

    target: Path
    source: Path | None = None

    @classmethod
    def from_option(cls, option: str, workdir: Path) -> Self:
        """What "SRC", "SRC:DST" and "SRC:DST:FLAGS" show."""
        source, _, rest = option.partition(":")
        target = rest.partition(":")[0] or source
        return cls(workdir / target, workdir / source)


def find_hidden_inputs(job: Job, mounts: Sequence[Mount], workdir: Path, advice: str) -> Iterator[str]:
    """Every input of a job that is here, and that a container with these mounts does not see.

    `workdir` is where its ranks run, which relative paths are of; `advice` what to say, {} being a directory.
    """
    for key, value, paths in find_local_inputs(job.recipe, job.start.origin):
        container_paths = (Path(os.path.normpath(workdir / path)) for path in paths)
        if unseen := next((path for path in container_paths if not _is_visible(mounts, path)), None):
            directory = unseen.parent if files.is_file(unseen) else unseen
            yield (
                f"{key} {value} is here, and no --mount shows it to the container:"
                f" {advice.format(directory)}, unless the image has it"
            )


def _is_visible(mounts: Sequence[Mount], path: Path) -> bool:
    """Whether that path leads to the same in the container, links within a mount included."""
    for target, source in mounts:
        if not path.is_relative_to(target):
            continue
        if source is None:
            return True
        real = Path(os.path.realpath(source / path.relative_to(target)))
        shown = (Path(os.path.realpath(source)), *(mount.target for mount in mounts))
        if any(real.is_relative_to(directory) for directory in shown):
            return True
    return False
