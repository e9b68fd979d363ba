"""What the verbs that start a job say of the disk that it will need, in the numbers of `check`."""

import logging

from bundle.planning.output import disk_shown
from bundle.recipe import Recipe
from bundle.runs.directory import RunDirectory

_log = logging.getLogger(__name__)


def say_room(recipe: Recipe, run: RunDirectory) -> None:
    """Warns where the checkpoints and exports of a run do not fit on its disk, if that can be looked at."""
    try:
        room = run.room(recipe)
    except OSError:  # it is that of the nodes alone
        return
    if not room.suffices:
        _log.warning("disk: %s", disk_shown(room, run.root))
