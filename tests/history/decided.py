"""What is decided about every commit of a Megatron-LM repository, in process and without a checkout."""

from collections.abc import Iterator
from pathlib import Path

from bundle.environment import packages
from bundle.patches import decision_rules
from bundle.patches.catalogue import PATCHES, TRAPS
from bundle.patches.decision_rules import PatchContext
from bundle.patches.definitions import Definitions
from bundle.patches.entry import PatchAction
from bundle.patches.megatron_core import DefectReader, load_review_table
from tests.history.git import CommitTree, Repository, files

NUMBER = "megatron.core.package_info"
State = tuple[str | None, ...]  # the blobs that decide


class Decided:
    """The decisions about each commit; commits that do not differ in any file that was read are one."""

    def __init__(self, repository: Repository) -> None:
        self.repository = repository
        self.read: set[str] = {NUMBER}  # every module that any decision asked for
        self._known: dict[State, dict[str, PatchAction | None]] = {}

    def __call__(self, commit: str) -> dict[str, PatchAction | None]:
        """The action for each patch and trap, by id, all features on; None for a trap that is not met."""
        state = self.state(commit)
        if state not in self._known:
            tree = CommitTree(Path(commit), repository=self.repository, commit=commit)
            found = dict(decisions(Definitions(tree), self._version(commit)))
            if not self.read.issuperset(tree.list_requested_modules()):
                self.read.update(tree.list_requested_modules())
                self._known.clear()
                state = self.state(commit)
            self._known[state] = found
        return self._known[state]

    def state(self, commit: str) -> State:
        """The blobs of the modules that decisions ask for."""
        return self.repository.blobs(commit, [file for module in sorted(self.read) for file in files(module)])

    def _version(self, commit: str) -> str | None:
        blob = self.repository.blob(commit, "megatron/core/package_info.py")
        return packages.build_version_from_constants(self.repository.text(blob).decode()) if blob else None


def decisions(definitions: Definitions, version: str | None) -> Iterator[tuple[str, PatchAction | None]]:
    job = PatchContext(version=version, requested=frozenset(patch.id for patch in PATCHES if patch.opt_in))
    reader = DefectReader(None, definitions, load_review_table())
    for patch in PATCHES:
        yield patch.id, decision_rules.decide_patch(patch, reader.read(patch), job).action
    for trap in TRAPS:
        met = decision_rules.decide_trap(trap, reader.read(trap), job)
        yield trap.id, met.action if met else None
