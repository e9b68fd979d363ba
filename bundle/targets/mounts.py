"""The mounts of a container on this machine, and the inputs of a job that these mounts hide."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from bundle import files
from bundle.launch.job import Job
from bundle.planning.inputs import find_existing_local_inputs


class Mount(NamedTuple):
    """A directory or file of a container.

    `source` is its path on this machine, or None where it is not a path of this machine.
    """

    target: Path
    source: Path | None = None

    @classmethod
    def from_option(cls, option: str, workdir: Path) -> Self:
        """Return the mount of the option "SRC", "SRC:DST" or "SRC:DST:FLAGS"."""
        source, _, rest = option.partition(":")
        target = rest.partition(":")[0] or source
        return cls(workdir / target, workdir / source)


def find_unmounted_inputs(job: Job, mounts: Sequence[Mount], workdir: Path, advice: str) -> Iterator[str]:
    """Yield a message for every input of a job that is on this machine and that the mounts do not show.

    Ranks run in `workdir`, to which relative paths belong. `advice` is the remedy, in which {} stands for a
    directory.
    """
    for key, value, paths in find_existing_local_inputs(job.recipe, job.start.origin):
        container_paths = (Path(os.path.normpath(workdir / path)) for path in paths)
        if unseen := next(
            (path for path in container_paths if not _is_container_path_visible(mounts, path)), None
        ):
            directory = unseen.parent if files.is_file(unseen) else unseen
            yield (
                f"{key} {value}: the container does not see this path of this machine. Unless the image"
                f" has it, {advice.format(directory)}"
            )


def _is_container_path_visible(mounts: Sequence[Mount], path: Path) -> bool:
    """Return whether a path leads to the same file in the container, links within a mount included."""
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
