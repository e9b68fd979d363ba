"""The warning of the verbs that start a job about its disk space, in the numbers of `check`."""

import logging

from bundle.planning.output import format_disk
from bundle.recipe import Recipe
from bundle.runs.directory import RunDirectory

_log = logging.getLogger(__name__)


def warn_disk_space(recipe: Recipe, run: RunDirectory) -> None:
    """Warn where the checkpoints and exports of a run do not fit on its disk, if the disk can be read."""
    try:
        disk_space = run.estimate_disk(recipe)
    except OSError:  # only the nodes have this disk
        return
    if not disk_space.is_sufficient:
        _log.warning("disk: %s", format_disk(disk_space, run.root))
