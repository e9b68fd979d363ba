"""Where the checkpoints of a run lie: complete ones by their step, the one being written apart."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from bundle.training import atomic
from bundle.training.checkpoints import manifest

LATEST = "latest"
_COMPLETE = re.compile(r"step-(\d{8,})")
_PARTIAL, _LEAVING = ".writing-", ".deleting-"


@dataclass(frozen=True)
class Shelf:
    """The folder `checkpoints` of a run directory. Only one process changes it."""

    root: Path

    def place(self, step: int) -> Path:
        """Returns where the complete checkpoint of `step` lies."""
        return self.root / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Returns the steps that have a complete checkpoint, the newest first.

        The names alone say it: a checkpoint gets its name, in one rename, when it is complete.
        """
        found = (_COMPLETE.fullmatch(path.name) for path in self.root.glob("step-*") if path.is_dir())
        return sorted((int(match.group(1)) for match in found if match), reverse=True)

    def start(self, step: int) -> Path:
        """Returns an empty folder to write the checkpoint of `step` into; leftovers of others are removed."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.clear()
        partial = self.partial(step)
        partial.mkdir()
        return partial

    def partial(self, step: int) -> Path:
        """Returns where the checkpoint of `step` is while it is written."""
        return self.root / f"{_PARTIAL}{step:08d}"

    def publish(self, step: int, keep: int) -> None:
        """Gives a written checkpoint its name, points `latest` at it, removes all but the `keep` newest."""
        place = self.place(step)
        atomic.sync_directory(self.partial(step))
        if place.exists():  # a resumed run came here again: its own is as good
            self._remove(place)
        self.partial(step).rename(place)
        atomic.sync_directory(self.root)
        # For people and scripts; a run that resumes looks at the folders, which cannot be behind.
        atomic.write_text(self.root / LATEST, f"{place.name}\n")
        for old in self.steps()[keep:]:
            self._remove(self.place(old))

    def clear(self) -> None:
        """Removes what interrupted writes and removals left."""
        for leftover in (*self.root.glob(f"{_PARTIAL}*"), *self.root.glob(f"{_LEAVING}*")):
            shutil.rmtree(leftover)

    def is_ours(self, directory: Path) -> bool:
        """Returns whether `directory` is a checkpoint that this run wrote, rather than one from elsewhere."""
        inside = directory.parent.resolve() == self.root.resolve() and not directory.is_symlink()
        return inside and (directory / manifest.NAME).exists()

    def _remove(self, directory: Path) -> None:
        # Renamed first: a removal that is interrupted must not leave half a checkpoint under its name.
        leaving = self.root / f"{_LEAVING}{directory.name}"
        directory.rename(leaving)
        shutil.rmtree(leaving)
