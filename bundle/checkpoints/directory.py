"""Where the checkpoints of a run lie: complete ones by their step, the one being written apart."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from bundle import files

LATEST, BEST = "latest", "best"
MEGATRON_FOLDER = "megatron"  # megatron's own folder inside a checkpoint, which Megatron-LM's tools read
_CHECKPOINT_NAME_PATTERN = re.compile(r"step-(\d{8,})")
_PARTIAL, _LEAVING, _DAMAGED = ".writing-", ".deleting-", "damaged-"
_REMOVABLE_ENTRY_PATTERN = re.compile(
    rf"\{_PARTIAL}\d{{8,}}|(\{_LEAVING})?({_DAMAGED})?{_CHECKPOINT_NAME_PATTERN.pattern}|{LATEST}|\.{LATEST}\.\d+|{BEST}"
)


@dataclass(frozen=True)
class CheckpointDirectory:
    """The folder `checkpoints` of a run directory. Only one process changes it."""

    root: Path

    def get_path(self, step: int) -> Path:
        """Return the path of the complete checkpoint of `step`."""
        return self.root / f"step-{step:08d}"

    def list_steps_newest_first(self) -> list[int]:
        """Return the steps that have a complete checkpoint, the newest first.

        The names alone decide: a checkpoint gets its name, in one rename, when it is complete.
        """
        if not files.is_directory(self.root):
            return []
        matches = (
            _CHECKPOINT_NAME_PATTERN.fullmatch(path.name)
            for path in self.root.glob("step-*")
            if path.is_dir()
        )
        return sorted((int(match.group(1)) for match in matches if match), reverse=True)

    def create_sole_partial(self, step: int) -> Path:
        """Create an empty folder for the checkpoint of `step`; remove leftovers of other checkpoints."""
        self.root.mkdir(exist_ok=True)  # without parents: a run directory that vanished must not come back
        self.remove_leftovers()
        partial = self.get_partial_path(step)
        partial.mkdir()
        return partial

    def get_partial_path(self, step: int) -> Path:
        """Return the path of the checkpoint of `step` while it is written."""
        return self.root / f"{_PARTIAL}{step:08d}"

    def publish(self, step: int, keep: int, best_step: int | None = None) -> None:
        """Give a written checkpoint its name, point `latest` at it and keep `keep` checkpoints up to it.

        The checkpoint of `best_step` stays too, and `best` names it.
        """
        partial, complete = self.get_partial_path(step), self.get_path(step)
        for directory in (path for path in partial.rglob("*") if path.is_dir()):
            files.sync_directory(directory)  # `partial` itself is synced with the manifest, its last file
        if complete.exists():  # a resumed run came here again: its own is as good
            self._remove(complete)
        partial.rename(complete)
        self._point_latest_at(step)  # syncs the new name too: what is older goes only then
        if best_step is not None and best_step in self.list_steps_newest_first():
            files.write_text(self.root / BEST, f"{self.get_path(best_step).name}\n")
        earlier_steps = [old for old in self.list_steps_newest_first() if old < step and old != best_step]
        for old in earlier_steps[keep - 1 :]:
            self._remove(self.get_path(old))

    def mark_newer_damaged(self, step: int) -> list[str]:
        """Rename every checkpoint after `step`, from which a run continues; return their new names.

        They are damaged. Under their old names they would count among the newest, which `publish` keeps.
        """
        names = []
        for newer in [step_number for step_number in self.list_steps_newest_first() if step_number > step]:
            damaged = self.root / f"{_DAMAGED}{self.get_path(newer).name}"
            if damaged.exists():
                self._remove(damaged)
            self.get_path(newer).rename(damaged)
            names.append(damaged.name)
        if names:
            self._point_latest_at(step)
        return names

    def remove_leftovers(self) -> None:
        """Remove what interrupted writes and removals left."""
        for leftover in (*self.root.glob(f"{_PARTIAL}*"), *self.root.glob(f"{_LEAVING}*")):
            _remove_path(leftover)

    def remove_all(self) -> None:
        """Remove every checkpoint, the newest first; the folder, which may be a link, and other files stay.

        An interrupted call leaves older checkpoints, from which the run can continue.
        """
        for step in self.list_steps_newest_first():
            self._remove(self.get_path(step))
        for path in [path for path in self.root.glob("*") if _REMOVABLE_ENTRY_PATTERN.fullmatch(path.name)]:
            _remove_path(path)

    def _point_latest_at(self, step: int) -> None:
        # For people and scripts; a run that resumes looks at the folders, which cannot be behind.
        files.write_text(self.root / LATEST, f"{self.get_path(step).name}\n")

    def _remove(self, directory: Path) -> None:
        # Renamed first: a removal that is interrupted must not leave half a checkpoint under its name.
        leaving = self.root / f"{_LEAVING}{directory.name}"
        directory.rename(leaving)
        _remove_path(leaving)


def _remove_path(path: Path) -> None:
    """Remove a folder, a file or a link; the target of a link is not ours and stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
