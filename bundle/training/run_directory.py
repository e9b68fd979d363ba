"""The directory of one run: everything that made it and everything it made."""

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bundle.errors import UsageError
from bundle.recipe import Recipe, differences, load
from bundle.training import atomic


@dataclass(frozen=True)
class RunDirectory:
    """The names inside a run directory; nothing needs to exist."""

    root: Path

    @property
    def recipe(self) -> Path:
        """The recipe, complete: a resumed run is compared with it."""
        return self.root / "recipe.yaml"

    @property
    def plan(self) -> Path:
        """What was decided before the run began."""
        return self.root / "plan.json"

    @property
    def versions(self) -> Path:
        """What was installed."""
        return self.root / "versions.json"

    @property
    def metrics(self) -> Path:
        """One JSON object per line, each with its `step`."""
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.root / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """One folder per checkpoint."""
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        """What the ranks of each launch said; kept by a fresh start, which is itself logged there."""
        return self.root / "logs"

    @property
    def result(self) -> Path:
        """Written when the run is finished, and only then."""
        return self.root / "result.json"

    def begin(self, recipe: Recipe, *, fresh: bool, resume: bool) -> bool:
        """Returns whether there is a run to go on with; looks only, and changes nothing.

        An unfinished run goes on without being asked: a scheduler starts the same command again.
        Raises UsageError for a finished run without a flag, for a recipe that is not the run's, and for
        --resume where there is nothing.
        """
        if fresh and resume:
            raise UsageError("--fresh starts over and --resume goes on: say one of them")
        if not self.recipe.exists():
            if resume:
                raise UsageError(f"{self.root}: there is no run to resume")
            return False
        if fresh:
            return False
        if self.result.exists() and not resume:
            raise UsageError(
                f"{self.root}: this run is finished; --fresh overwrites it, --resume goes on with it"
            )
        self._refuse_another(recipe)
        return True

    def write_start(self, recipe: Recipe, plan: Mapping[str, Any], versions: Mapping[str, Any]) -> None:
        """Writes what makes this run; what an earlier run here made, but for its logs, is removed first."""
        for path in (self.result, self.recipe, self.metrics, self.plan, self.versions):
            path.unlink(missing_ok=True)
        for directory in (self.checkpoints, self.tensorboard):
            if directory.exists():
                shutil.rmtree(directory)
        self.root.mkdir(parents=True, exist_ok=True)
        self.describe(plan, versions)
        # The last one: with it the directory holds a run.
        atomic.write_text(self.recipe, yaml.safe_dump(recipe.dump(), sort_keys=False, allow_unicode=True))

    def describe(self, plan: Mapping[str, Any], versions: Mapping[str, Any]) -> None:
        """Writes plan and versions; a resumed run may have others than the one before it."""
        atomic.write_json(self.plan, plan)
        atomic.write_json(self.versions, versions)

    def rewind_metrics(self, step: int) -> None:
        """Takes out what an interrupted run noted after `step`: the resumed run will note it again."""
        if not self.metrics.exists():
            return
        kept = []
        for line in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                noted = json.loads(line)
            except ValueError:
                continue  # the line that was being written when the run ended
            if isinstance(noted, dict) and noted.get("step", 0) <= step:
                kept.append(line)
        atomic.write_text(self.metrics, "".join(f"{line}\n" for line in kept))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the directory for this process; raises UsageError while another run holds it.

        The kernel lets go when the process ends, however it ends.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise UsageError(f"{self.root}: another run is using it ({file.read()})") from None
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield

    def _refuse_another(self, recipe: Recipe) -> None:
        saved = load(self.recipe)
        changed = [str(change) for change in differences(saved, recipe) if not change.free_on_resume]
        if changed:
            raise UsageError(
                f"{self.root} holds a run of another recipe; change it back, name this run otherwise,"
                " or --fresh overwrites it",
                changed,
            )
