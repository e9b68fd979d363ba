"""What a container is shown of this machine's disks, and which inputs of a job it would not find there."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from bundle import files
from bundle.launch.job import Job
from bundle.planning.inputs import found


class Mount(NamedTuple):
    """A directory or file of a container. `source`: what it is of this machine; None: nothing of it."""

    target: Path
    source: Path | None = None

    @classmethod
    def read(cls, written: str, workdir: Path) -> Self:
        """What "SRC", "SRC:DST" and "SRC:DST:FLAGS" show."""
        source, _, rest = written.partition(":")
        target = rest.partition(":")[0] or source
        return cls(workdir / target, workdir / source)


def hidden(job: Job, mounts: Sequence[Mount], workdir: Path, advice: str) -> Iterator[str]:
    """Every input of a job that is here, and that a container with these mounts does not see.

    `workdir` is where its ranks run, which relative paths are of; `advice` what to say, {} being a directory.
    """
    for key, written, paths in found(job.recipe, job.start.origin):
        inside = (Path(os.path.normpath(workdir / path)) for path in paths)
        if unseen := next((path for path in inside if not _sees(mounts, path)), None):
            place = unseen.parent if files.is_file(unseen) else unseen
            yield (
                f"{key} {written} is here, and no --mount shows it to the container:"
                f" {advice.format(place)}, unless the image has it"
            )


def _sees(mounts: Sequence[Mount], path: Path) -> bool:
    """Whether that path leads to the same in the container, links within a mount included."""
    for target, source in mounts:
        if not path.is_relative_to(target):
            continue
        if source is None:
            return True
        real = Path(os.path.realpath(source / path.relative_to(target)))
        shown = (Path(os.path.realpath(source)), *(mount.target for mount in mounts))
        if any(real.is_relative_to(each) for each in shown):
            return True
    return False
