"""Where a measurement runs: one rank, its backend, and the layouts that it sets up one after the other."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from bundle.backends import Runtime
from bundle.mcore import groups
from bundle.mcore.groups import Groups
from bundle.recipe import Parallel


class NotProvable(Exception):
    """This machine or this release cannot show the defect; the message says why."""


@dataclass(frozen=True)
class Bench:
    """One rank of an experiment. All ranks run the same measurement."""

    runtime: Runtime
    device: torch.device
    directory: Path  # empty, for files of the experiment; the same for all ranks
    timeout_seconds: int

    @contextmanager
    def layout(self, *, tp: int = 1, cp: int = 1, ep: int = 1) -> Iterator[Groups]:
        """The process groups of a layout; without arguments every rank computes the whole by itself."""
        sizes = Parallel(tp=tp, cp=cp, ep=ep, etp=1 if ep > 1 else tp)
        made = groups.initialize(sizes, seed=1, timeout_seconds=self.timeout_seconds)
        try:
            yield made
        finally:
            groups.destroy()
