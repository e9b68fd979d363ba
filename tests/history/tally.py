"""How the decisions over a repository's history agree with the truth about it, by branch and by entry."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from bundle.patches.entry import PatchAction
from tests.history.decided import Decided
from tests.history.git import Repository
from tests.history.truth import PRESENT

BRANCHES = ("main", "dev", *(f"core_r0.{minor}.0" for minor in range(12, 20)))
RIGHT, WRONG, UNDECIDED = "right", "wrong", "undecided"


@dataclass(frozen=True)
class Row:
    """One decision about one commit, and whether the defect is there."""

    commit: str
    entry: str
    action: PatchAction | None
    present: bool

    @property
    def verdict(self) -> str:
        """Right, wrong or undecided."""
        if self.action in (PatchAction.APPLY, PatchAction.TRAP):
            return RIGHT if self.present else WRONG
        if self.action is PatchAction.DRIFT:
            return UNDECIDED
        return WRONG if self.present else RIGHT


class Truth:
    """The truth about commits; of those with the same blobs it is asked once."""

    def __init__(self, repository: Repository) -> None:
        self.repository = repository
        self._known: dict[str, dict[tuple[tuple[str, str | None], ...], bool]] = {}

    def __call__(self, commit: str, entry: str) -> bool:
        """Whether the commit has the defect."""
        known = self._known.setdefault(entry, {})
        for read, present in known.items():
            if all(self._blob(commit, module) == blob for module, blob in read):
                return present
        asked: dict[str, str | None] = {}

        def text(module: str) -> str:
            asked[module] = blob = self._blob(commit, module)
            return self.repository.text(blob).decode() if blob else ""

        present = PRESENT[entry](text)
        known[tuple(asked.items())] = present
        return present

    def _blob(self, commit: str, module: str) -> str | None:
        return self.repository.blob(commit, f"megatron/core/{module.replace('.', '/')}.py")


def held_out(repository: Repository, branches: Iterable[str] = BRANCHES) -> dict[str, list[str]]:
    """The commits of each branch, newest first, that are no release and on no branch before it."""
    seen = repository.releases()
    found: dict[str, list[str]] = {}
    for branch in branches:
        if repository.head(branch) is not None:
            found[branch] = [commit for commit in repository.commits(branch) if commit not in seen]
            seen.update(found[branch])
    return found


def rows(repository: Repository, commits: Iterable[str], decided: Decided, truth: Truth) -> list[Row]:
    """Every decision about the commits."""
    return [
        Row(commit, entry, action, truth(commit, entry))
        for commit in commits
        for entry, action in decided(commit).items()
        if entry in PRESENT
    ]


def undecided(of: Iterable[Row]) -> float:
    """The share of the defects that are there about which nothing was decided."""
    counted = Counter((row.present, row.verdict) for row in of)
    there = sum(count for (present, _), count in counted.items() if present)
    return counted[True, UNDECIDED] / there if there else 0.0


def transitions(of: Iterable[Row], entry: str) -> list[Row]:
    """The rows of one entry, oldest first, at which its action or its truth changes; `of` is newest first."""
    found: list[Row] = []
    for row in reversed([row for row in of if row.entry == entry]):
        if not found or (found[-1].action, found[-1].present) != (row.action, row.present):
            found.append(row)
    return found
